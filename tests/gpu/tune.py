"""Sweeps the kernels' tile choices on a GPU, at the shapes of Ouro-1.4B in BF16.

    python tests/gpu/tune.py matmul decode prefill norm --output tune.json

Every configuration is compiled first, in as many processes as there are cores, then timed alone:
the calls of one CUDA graph that walks all layers' own weights and caches, so that no run finds its
data in L2. Prints the best few of each shape and what the default gives.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from ouro_batch.kernels import decode_attention as decode
from ouro_batch.kernels import matmul, norm
from ouro_batch.kernels import prefill_attention as prefill
from ouro_batch.kernels.decode_work import DecodeWork, build_decode_work

LAYERS, HIDDEN, HEADS, HEAD_DIM, MLP, VOCAB = 24, 2048, 16, 128, 5632, 49152
BLOCK = 16
DTYPE = torch.bfloat16
COMPILING = False  # in the processes that only fill Triton's cache


@dataclass
class Trial:
    """One configuration of one shape: ``run(layer)`` launches it with that layer's data."""

    shape: str
    config: dict
    run: Callable[[int], None]
    bytes: float  # that one launch must move
    flops: float = 0.0
    layers: int = LAYERS


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=DTYPE, device="cuda")


def matmul_trials() -> Iterator[Trial]:
    products = {
        "qkv": (6144, HIDDEN, False, False),
        "o": (HIDDEN, HIDDEN, False, True),
        "gate_up": (MLP, HIDDEN, True, False),
        "down": (HIDDEN, MLP, False, True),
        "lm_head": (VOCAB, HIDDEN, False, False),
    }
    for name, (columns, inner, gated, partial) in products.items():
        layers = 4 if name == "lm_head" else LAYERS
        weight = random(layers, columns * (2 if gated else 1), inner) * inner**-0.5
        for rows in (1, 8, 32, 64):
            x = random(rows, inner)
            out = torch.empty(rows, columns, dtype=DTYPE, device="cuda")
            default = matmul.choose_tiles(rows, columns, inner, gated, DTYPE)
            tiles = {default}
            for n, k, split, stages in itertools.product(
                (16, 32, 64, 128), (128, 256), (1, 2, 3, 4, 8), (3, 5)
            ):
                programs = -(-columns // n) * split
                stage = 2 * k * (n * (2 if gated else 1) + max(16, rows))
                if not 110 <= programs <= 800 or stage * stages > 200 * 1024:
                    continue
                if inner // k >= split * 2 and (stage * stages >= 48 * 1024 or stages == 5):
                    warps = 8 if n == 128 else 4
                    tiles.add(matmul.Tiles(k, split, block_n=n, stages=stages, warps=warps))
            for choice in sorted(tiles, key=str):
                sums = torch.zeros(
                    choice.split_k, rows, columns * (2 if gated else 1), device="cuda"
                )
                counters = torch.zeros(4096, dtype=torch.int32, device="cuda")

                def run(layer: int, x=x, out=out, sums=sums, counters=counters, tiles=choice,
                        weight=weight, partial=partial, gated=gated) -> None:  # fmt: skip
                    if partial:
                        matmul.linear_partials(sums, x, weight[layer], tiles=tiles)
                    else:
                        matmul.linear(
                            out, x, weight[layer], partials=sums, counters=counters,
                            gated=gated, tiles=tiles,
                        )  # fmt: skip

                config = vars(choice) | {"default": choice == default}
                moved = weight[0].nbytes + x.nbytes + out.nbytes
                yield Trial(f"{name} x {rows}", config, run, moved, layers=layers)


def decode_trials() -> Iterator[Trial]:
    shapes = ((1, 256), (8, 1088), (32, 1088), (128, 1088), (256, 256), (1, 16384), (16, 16384))
    if COMPILING:  # a variant is the same for every shape
        shapes = shapes[:1]
    for head_major in (False, True):
        for rows, context in shapes:
            layers = min(LAYERS, max(2, 24 * 64 * 1088 // (rows * context)))
            blocks = rows * -(-context // BLOCK)
            shape = (layers, blocks, BLOCK, HEADS, HEAD_DIM)
            if head_major:
                shape = (layers, blocks, HEADS, BLOCK, HEAD_DIM)
            keys, values = random(*shape), random(*shape)
            if head_major:
                keys, values = keys.transpose(2, 3), values.transpose(2, 3)
            queries = random(rows, HEADS, HEAD_DIM)
            out = torch.empty_like(queries)
            order = torch.randperm(blocks, device="cuda").int().view(rows, 1, -1)
            prompt = context * 15 // 16 // BLOCK * BLOCK
            slots = order[:, :, prompt // BLOCK :, None] * BLOCK
            slots = (slots + torch.arange(BLOCK, device="cuda").int()).flatten(2).contiguous()
            index = torch.arange(rows, device="cuda").int()
            lengths = torch.full((rows,), prompt, device="cuda").int()
            for split in (64, 128, 256, 512, 1024):
                if split > max(context, 64):
                    continue
                work = DecodeWork.allocate(
                    rows, DecodeWork.max_items(rows, rows * context, split),
                    HEADS, HEADS, HEAD_DIM, torch.device("cuda"), split,
                )  # fmt: skip
                build_decode_work(
                    work, index, torch.zeros_like(index), torch.full_like(index, context), lengths
                )
                sms = torch.cuda.get_device_properties(0).multi_processor_count
                for tile, warps, fused, each in itertools.product(
                    (16, 32, 64), (2, 4), (False, True), (4, 8, 16)
                ):
                    if tile == 64 and warps == 2:
                        continue

                    def run(layer: int, args=(out, queries), kv=(keys, values), order=order,
                            slots=slots, work=work, tile=tile, warps=warps, fused=fused,
                            programs=each * sms) -> None:  # fmt: skip
                        decode.decode_attention(
                            *args, kv[0][layer], kv[1][layer], order, slots, work, tile=tile,
                            num_warps=warps, fused_merge=fused, programs=programs,
                        )  # fmt: skip

                    yield Trial(
                        f"decode {rows} x {context}",
                        {"split": split, "tile": tile, "warps": warps, "fused_merge": fused,
                         "programs_per_sm": each, "head_major": head_major},
                        run,
                        2.0 * rows * context * HEADS * HEAD_DIM * 2,
                        layers=layers,
                    )  # fmt: skip
            del keys, values


def prefill_trials() -> Iterator[Trial]:
    for name, segments in {
        "4 x 1,024": [(row, 0, 1024) for row in range(4)],
        "4,096 at 12,288": [(0, 12288, 4096)],
    }.items():
        rows = len(segments)
        length = segments[0][1] + segments[0][2]
        shape = (2, rows * length // BLOCK, BLOCK, HEADS, HEAD_DIM)
        keys, values = random(*shape), random(*shape)
        blocks = torch.randperm(shape[1], device="cuda").int().view(rows, 1, -1)
        queries = random(4096, HEADS, HEAD_DIM)
        out = torch.empty_like(queries)
        pairs = sum(n * start + n * (n + 1) / 2 for _, start, n in segments)
        choices = [
            (m, n, warps, stages, None)
            for m, n, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (2, 3, 4))
            if m == 64 or warps == 8
        ]
        # Two programs a multiprocessor, one of which multiplies while the other exponentiates.
        choices += [(128, 32, 8, s, 128) for s in (2, 3, 4)] + [(128, 64, 8, 2, 128)]
        choices += [(*choice, True) for choice in (*choices[-4:], (128, 64, 8, 3, None))]
        for choice in choices:
            m = choice[0]
            config = prefill.PrefillConfig(*choice)
            tiles = torch.tensor(prefill.prefill_tiles(segments, m), device="cuda").int()

            def run(layer: int, kv=(keys, values), args=(out, queries), tiles=tiles,
                    blocks=blocks, config=config) -> None:  # fmt: skip
                prefill.prefill_attention(
                    *args, kv[0][layer], kv[1][layer], tiles, 0, blocks, config=config
                )

            yield Trial(
                f"prefill {name}", vars(config), run, 0.0, 4.0 * pairs * HEADS * HEAD_DIM, layers=2
            )


def norm_trials() -> Iterator[Trial]:
    for rows, split in itertools.product((1, 64, 128, 4096), (1, 4, 8)):
        if rows > 64 and split > 1:
            continue
        hidden, out = random(rows, HIDDEN), random(rows, HIDDEN)
        update = random(rows, HIDDEN) if split == 1 else random(split, rows, HIDDEN).float()
        weight = random(HIDDEN)
        for warps in (2, 4, 8, 16):

            def run(layer: int, args=(hidden, update, weight, out, weight, 1e-6),
                    warps=warps) -> None:  # fmt: skip
                norm.add_rms_norm(*args, num_warps=warps)

            moved = 3 * hidden.nbytes + update.nbytes
            yield Trial(f"add_rms_norm {rows} split {split}", {"warps": warps}, run, moved)


FAMILIES = {
    "matmul": matmul_trials,
    "decode": decode_trials,
    "prefill": prefill_trials,
    "norm": norm_trials,
}


def microseconds(trial: Trial, repeats: int = 7) -> float:
    """Median time of one launch within a graph of one launch a layer."""
    trial.run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(trial.layers):
            trial.run(layer)
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / trial.layers)
    return statistics.median(times)


def compile_some(families: list[str], part: int, parts: int) -> None:
    """Launch every ``parts``-th kernel variant once: its binary goes into Triton's cache."""
    globals().update(LAYERS=1, COMPILING=True)
    seen: set[str] = set()
    for family in families:
        for trial in FAMILIES[family]():
            variant = dict(trial.config)
            for runtime in ("split", "programs_per_sm", "default"):
                variant.pop(runtime, None)
            shape = trial.shape.split(" x ")[0] if family == "decode" else trial.shape
            shape = shape.replace(" x 8", " x 1")  # both have a row tile of 16
            name = f"{family} {shape} {sorted(variant.items())}"
            if name in seen:
                continue
            seen.add(name)
            if len(seen) % parts == part:
                try:
                    trial.run(0)
                except Exception as error:
                    print(f"{name}: {error}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="+", choices=FAMILIES)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--show", type=int, default=4)
    args = parser.parse_args()
    parts = max(1, (os.cpu_count() or 2) - 1)
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=compile_some, args=(args.families, part, parts))
        for part in range(parts)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    results: dict[str, list[dict]] = {}
    for family in args.families:
        for trial in FAMILIES[family]():
            try:
                time = microseconds(trial)
            except Exception as error:  # a configuration that does not fit
                print(f"{trial.shape} {trial.config}: {str(error)[:80]}", file=sys.stderr)
                continue
            row = dict(trial.config) | {"us": round(time, 2)}
            if trial.bytes:
                row["tb_s"] = round(trial.bytes / time / 1e6, 3)
            if trial.flops:
                row["tflop_s"] = round(trial.flops / time / 1e6, 1)
            results.setdefault(trial.shape, []).append(row)
        if args.output:
            args.output.write_text(json.dumps(results, indent=1))
    for shape, rows in results.items():
        rows.sort(key=lambda row: row["us"])
        print(shape)
        for row in [*rows[: args.show], *(r for r in rows[args.show :] if r.get("default"))]:
            print("   ", " ".join(f"{name}={value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
