"""How fast lines go through a job's real reader and writer, and how much memory that takes.

    taskset -c 0 python -m tests.job_throughput 1000000

The engine is an echo. Prints JSON: lines, seconds, lines a second, and the resident memory in MiB
after a tenth of the lines and at the most.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from ouro_batch.jobs.job import Job
from ouro_batch.jobs.writer import open_writer
from ouro_batch.params import RequestOutput, SamplingParams, Timing, Usage
from tests.fakes import FakeSnapshot

LOOPS = 4


class Echo:
    """Answers every request in the next step with its own prompt."""

    def __init__(self) -> None:
        self._requests: list[tuple[int, list[int], SamplingParams, int, int]] = []
        self._next_id = 0

    def encode(self, prompt, messages=None, chat_template_kwargs=None):
        return list(prompt.encode())

    def add_request(self, prompt, params, *, index=0, sample=0, too_long="error"):
        self._next_id += 1
        self._requests.append((self._next_id, prompt, params, index, sample))
        return self._next_id

    def step(self):
        requests, self._requests = self._requests, []
        return [
            RequestOutput(
                request_id=request_id,
                text=bytes(prompt).decode(),
                token_ids=prompt,
                exit_depths=[LOOPS] * len(prompt),
                finish_reason="stop",
                usage=Usage(len(prompt), len(prompt), LOOPS * (len(prompt) - 1)),
                timing=Timing(0.1, 0.2, 0.3, 0.6),
                seed=index,
                index=index,
                sample=sample,
            )
            for request_id, prompt, _, index, sample in requests
        ]

    def abort(self, request_id):
        pass

    def waiting_requests(self):
        return []

    def token_text(self, token_id):
        return chr(token_id)

    def snapshot(self):
        return FakeSnapshot(256, 256, len(self._requests), 0, 1, 0, 0, 0, 0)


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure(lines: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        with source.open("w") as file:
            file.writelines(f'{{"id": "q{n}", "prompt": "Say {n}"}}\n' for n in range(lines))
        writer = open_writer(str(out))
        writer.begin({"model": "echo"})
        memory: list[float] = []

        class Watch:
            def update(self, counts, engine):
                if counts.done >= lines // 10 and counts.done % 1000 < 300:
                    memory.append(resident_mib())

            def close(self):
                pass

        started = time.perf_counter()
        job = Job(Echo(), [str(source)], writer, progress=Watch())
        job.run()
        memory.append(resident_mib())
        writer.complete(job.lines)
        writer.finish()
        memory.append(resident_mib())
        seconds = time.perf_counter() - started
        with out.open("rb") as file:
            written = sum(1 for _ in file)
        assert written == lines, written
    return {
        "lines": lines,
        "seconds": round(seconds, 2),
        "lines_per_second": round(lines / seconds),
        "mib_after_a_tenth": round(memory[0], 1),
        "mib_at_most": round(max(memory), 1),
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
