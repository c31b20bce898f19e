"""Measures tiny-ouro through the product's own API and writes the tables of samples/README.md.

python samples/evaluate.py                # all of eval.jsonl: four minutes on 2 cores
python samples/evaluate.py --every 10     # a tenth of it, printed only
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tasks import TASKS, is_correct

from ouro_batch import LLM, SamplingParams

HERE = Path(__file__).parent
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
RESAMPLES = 10_000


@dataclass
class Result:
    """One setting over all problems: which answers are right, and every token's exit depth."""

    correct: np.ndarray
    depths: list[list[int]]

    @property
    def decoded(self) -> np.ndarray:
        """Depths of the decode runs; the first token of an answer comes from prefill."""
        return np.array([depth for row in self.depths for depth in row[1:]])


def run(llm: LLM, records: list[dict], params: list[SamplingParams]) -> Result:
    """Answer ``records``, record i with ``params[i]``."""
    outputs = [None] * len(records)
    for field, answer in (("prompt", llm.generate), ("messages", llm.chat)):
        chosen = [i for i, record in enumerate(records) if field in record]
        answers = answer([records[i][field] for i in chosen], [params[i] for i in chosen])
        for i, output in zip(chosen, answers, strict=True):
            outputs[i] = output
    correct = [
        output.finish_reason == "stop" and is_correct(output.text, record["metadata"]["answer"])
        for output, record in zip(outputs, records, strict=True)
    ]
    return Result(np.array(correct), [output.exit_depths for output in outputs])


def at_threshold(
    llm: LLM, records: list[dict], threshold: float, max_loops: int | None = None
) -> Result:
    """Answer with the gate at ``threshold`` (1 is fixed depth), capped at ``max_loops``."""
    params = [
        SamplingParams(max_tokens=r["max_tokens"], exit_threshold=threshold, max_loops=max_loops)
        for r in records
    ]
    return run(llm, records, params)


def shuffled(llm: LLM, records: list[dict], gate: Result, seed: int) -> Result:
    """Answer ``records`` with the gate's depths dealt out at random among all decoded tokens."""
    rng = random.Random(seed)
    pool = gate.decoded.tolist()
    deck = rng.sample(pool, len(pool))
    params = []
    for record, row in zip(records, gate.depths, strict=True):
        own = [row[0], *(deck.pop() for _ in row[1:])]
        # An answer that goes wrong may run longer than the gate's: more depths of the same kind.
        own += rng.choices(pool, k=record["max_tokens"] - len(own))
        params.append(SamplingParams(max_tokens=record["max_tokens"], exit_depths=own))
    return run(llm, records, params)


def interval(differences: np.ndarray) -> tuple[float, float]:
    """95% bootstrap interval of the mean, over problems."""
    rng = np.random.default_rng(0)
    means = [rng.choice(differences, len(differences)).mean() for _ in range(RESAMPLES)]
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class Tables:
    """Runs every setting and lays the results out."""

    def __init__(self, model: Path, records: list[dict], shuffles: int, device: str):
        self.records, self.shuffles = records, shuffles
        self.load = partial(LLM, str(model), device=device, dtype="float32")
        self.llm = self.load()
        self.loops = self.llm.config.loops
        self.own = json.loads((model / "config.json").read_text())["early_exit_threshold"]
        names = np.array([r["metadata"]["task"] for r in records])
        self.masks = {task: names == task for task in TASKS}

    def write(self) -> str:
        """All tables as Markdown."""
        full = at_threshold(self.llm, self.records, 1.0)
        rows = []
        for loops in range(1, self.loops):
            result = at_threshold(self.load(loops=loops), self.records, 1.0)
            rows.append(self._row(f"`--loops {loops} --exit-threshold 1`", result))
        rows.append(self._row(f"full depth, {self.loops} loops", full))
        for loops in range(1, self.loops):
            capped = at_threshold(self.llm, self.records, 1.0, max_loops=loops)
            rows.append(self._row(f"full prefill, decode at {loops}", capped))
        gates = {}
        for threshold in sorted({*THRESHOLDS, self.own} - {1.0}):
            gates[threshold] = at_threshold(self.llm, self.records, threshold)
            name = f"threshold {threshold}"
            rows.append(
                self._row(f"**{name}**" if threshold == self.own else name, gates[threshold])
            )
        header = ["setting", "all", "mean depth", *TASKS]
        return "\n\n".join(
            [
                f"Accuracy in percent on {len(self.records):,} problems. Mean depth counts decoded"
                " tokens; the checkpoint's own threshold is in bold.",
                table(header, rows),
                self._histogram(gates),
                *self._against_shuffled(gates),
            ]
        )

    def _row(self, name: str, result: Result) -> list[str]:
        by_task = [f"{100 * result.correct[mask].mean():.1f}" for mask in self.masks.values()]
        row = [name, f"{100 * result.correct.mean():.1f}", f"{result.decoded.mean():.2f}", *by_task]
        print(*row, flush=True)
        return row

    def _histogram(self, gates: dict[float, Result]) -> str:
        depths = range(1, self.loops + 1)
        rows = [
            [f"threshold {t}", *(f"{100 * (result.decoded == d).mean():.1f}" for d in depths)]
            for t, result in gates.items()
        ]
        header = ["decoded tokens, percent", *(f"depth {d}" for d in depths)]
        return table(header, rows)

    def _against_shuffled(self, gates: dict[float, Result]) -> list[str]:
        header = ["setting", "problems", "gate", "shuffled", "difference", "95% interval"]
        rows = []
        # The checkpoint's threshold by task; the most careful one, which spends more loops.
        for threshold in dict.fromkeys((self.own, max(gates))):
            if threshold not in gates:
                continue
            gate = gates[threshold]
            mixed = [shuffled(self.llm, self.records, gate, s) for s in range(self.shuffles)]
            chance = np.mean([m.correct for m in mixed], axis=0)
            depth = np.mean([m.decoded.mean() for m in mixed])
            print(f"shuffled {threshold}: {chance.mean():.3f} at depth {depth:.2f}", flush=True)
            everything = np.ones(len(chance), bool)
            parts = {"all": everything} | (self.masks if threshold == self.own else {})
            for part, mask in parts.items():
                gain = gate.correct[mask] - chance[mask]
                low, high = interval(gain)
                name = part
                if part == "all":
                    name = (
                        f"threshold {threshold}, mean depth {gate.decoded.mean():.2f}"
                        f" (shuffled {depth:.2f})"
                    )
                rows.append(
                    [
                        name,
                        f"{mask.sum()}",
                        f"{100 * gate.correct[mask].mean():.1f}",
                        f"{100 * chance[mask].mean():.1f}",
                        f"{100 * gain.mean():+.1f}",
                        f"{100 * low:+.1f} to {100 * high:+.1f}",
                    ]
                )
        text = (
            "The gate against chance: the gate's exit depths replayed as they are, and dealt out"
            f" at random among all decoded tokens ({self.shuffles} shuffles, averaged by problem;"
            " paired bootstrap over problems)."
        )
        return [text, table(header, rows)]


def main() -> None:
    """Measure and, when all problems were used, write the tables into README.md."""
    parser = argparse.ArgumentParser(description="Measure tiny-ouro.")
    parser.add_argument("--model", type=Path, default=HERE / "tiny-ouro")
    parser.add_argument("--every", type=int, default=1, help="use one problem in so many")
    parser.add_argument("--shuffles", type=int, default=3)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda; FP32 on either")
    args = parser.parse_args()
    lines = (HERE / "eval.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines[:: args.every]]
    begun = time.time()
    text = Tables(args.model, records, args.shuffles, args.device).write()
    print(f"\n{text}\n\n{time.time() - begun:.0f} s")
    readme = HERE / "README.md"
    if args.every == 1:
        before, rest = readme.read_text().split(BEGIN)
        readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
