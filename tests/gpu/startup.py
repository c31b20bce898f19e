"""Times the start of a job on a GPU: from the command to the first record, at Ouro-1.4B's shape.

    python -m tests.gpu.startup CHECKPOINT [--starts 2] [--output start.json] [--kernels]

CHECKPOINT is made by ``random_checkpoint``. The first start finds an empty Triton cache, the
following ones what it left; the weights are in the page cache each time. ``--kernels`` makes one
more start with an empty cache and lists what was compiled, when, and for how long.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

from ouro_batch.bench import machine

RECORDS, TOKENS = 64, 32
CACHE = Path("/tmp/ouro-start-cache")
# Runs the command line in a process that logs every compilation.
LOGGED = """
import sys, time, threading
import triton
def log(*, src, metadata, metadata_group, times, cache_hit):
    total = (times.total if times is not None else 0) / 1e6
    print(f"KERNEL {time.time():.3f} {total:.3f} {cache_hit} {threading.current_thread().name}"
          f" {src.fn.__name__} {times.lowering_stages if times else ''}", file=sys.stderr)
triton.knobs.compilation.listener = log
from ouro_batch.cli import main
sys.argv[0] = "ouro-batch"
main()
"""


def command(python: list[str], folder: Path, prompts: Path, out: Path) -> list[str]:
    return [
        *python, "run", str(prompts), "-o", str(out), "--model", str(folder),
        "--max-tokens", str(TOKENS), "--ignore-eos", "--overwrite", "--quiet",
    ]  # fmt: skip


def first_record_s(words: list[str], out: Path) -> tuple[float, str]:
    """Seconds from the command to its first record, and what it said."""
    part = out.with_name(out.name + ".part")
    for path in (out, part):
        path.unlink(missing_ok=True)
    environ = os.environ | {"TRITON_CACHE_DIR": str(CACHE)}
    started = time.time()
    with subprocess.Popen(words, env=environ, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            found = next((path for path in (part, out) if path.exists()), None)
            if found and found.read_bytes().count(b'"exit_depths"'):
                break
            time.sleep(0.02)
        took = time.time() - started
        said = process.stderr.read()
    if process.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{said}")
    return took, f"START {started:.3f} FIRST {took:.3f}\n{said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--kernels", action="store_true")
    options = parser.parse_args()
    draw = random.Random(0)
    prompts, out = Path("/tmp/ouro-start.jsonl"), Path("/tmp/ouro-start.out.jsonl")
    with prompts.open("w") as file:
        for _ in range(RECORDS):
            tokens = [draw.randrange(100, 49_000) for _ in range(draw.randrange(20, 200))]
            file.write(json.dumps({"prompt": tokens}) + "\n")
    for path in options.checkpoint.glob("*.safetensors"):
        path.read_bytes()
    plain = [sys.executable, "-m", "ouro_batch"]
    shutil.rmtree(CACHE, ignore_errors=True)
    seconds = []
    for _ in range(options.starts):
        seconds.append(
            round(first_record_s(command(plain, options.checkpoint, prompts, out), out)[0], 2)
        )
        print(f"start {len(seconds)}: first record after {seconds[-1]} s", flush=True)
    if options.kernels:
        shutil.rmtree(CACHE, ignore_errors=True)
        logged = command([sys.executable, "-c", LOGGED], options.checkpoint, prompts, out)
        print(first_record_s(logged, out)[1])
    if options.output:
        import torch

        record = {
            "workload": f"{RECORDS} requests of 20 to 199 tokens, {TOKENS} generated",
            "first_record_s": seconds,
            "triton_cache": ["empty", *["kept"] * (len(seconds) - 1)],
            "machine": machine.machine(torch.device("cuda")),
            "versions": machine.versions(),
            "commit": machine.commit(),
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
