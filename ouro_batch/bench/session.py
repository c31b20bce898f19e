"""A benchmark from settings to results: which LLM runs which workload, and in what order."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from ouro_batch.bench import machine
from ouro_batch.bench.floor import Ceilings, Costs, floor_tok_s, measure_ceilings
from ouro_batch.bench.measure import Requests, repetition, run_pass
from ouro_batch.bench.profile import profile_steps
from ouro_batch.bench.report import Document, row_line
from ouro_batch.bench.workload import BenchError, Trace, Workload
from ouro_batch.errors import EngineError, OuroBatchError, RequestError
from ouro_batch.llm import LLM
from ouro_batch.model.source import ModelSource
from ouro_batch.params import SamplingParams

MEDIANS = (
    "decode_tok_s",
    "prefill_tok_s",
    "end_to_end_tok_s",
    "steady_decode_tok_s",
    "mean_depth",
    "prefill_s",
    "total_s",
)


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


COMPARABLE = {
    "schedule": str,
    "attention": str,
    "dtype": str,
    "exit": str,
    "loops": int,
    "max_rows": int,
    "max_batched_tokens": int,
    "max_model_len": int,
    "block_size": int,
    "kv_tokens": int,
    "kv_memory": float,
    "gpu_memory_utilization": float,
    "batch_invariant": _truth,
}


@dataclass(frozen=True)
class Plan:
    """What to measure. ``options`` are the LLM's, without its schedule; ``exits`` holds "fixed",
    "trace" or both; ``profile`` is a number of decode steps, 0 for none."""

    workloads: Sequence[Workload]
    exits: Sequence[str]
    schedules: Sequence[str]
    trace: Trace
    repetitions: int = 3
    warmup: int = 1
    profile: int = 0
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def llm_options(self, schedule: str) -> dict[str, Any]:
        """One LLM serves every workload: rows for the widest, positions for the longest."""
        options = {"schedule": schedule, **self.options}
        options["max_rows"] = options.get("max_rows") or max(w.n for w in self.workloads)
        longest = max(w.length for w in self.workloads)
        options["max_model_len"] = options.get("max_model_len") or longest
        return options


class Bench:
    """Runs a plan on a model; every row is in ``document`` as soon as it is measured.

    Args:
        say: told one line of text about each row.
    """

    def __init__(
        self, source: ModelSource, document: Document, say: Callable[[str], None] = lambda _: None
    ):
        self.source = source
        self.document = document
        self.say = say
        self.failed = False
        self._ceilings: Ceilings | None = None

    def run(self, plan: Plan) -> None:
        """Measure every workload with every exit and schedule, one LLM a schedule."""
        for schedule in plan.schedules:
            wanted = [(w, e) for w in plan.workloads for e in plan.exits]
            llm = None
            try:
                llm, start_up = self._open(plan, schedule)
                for workload, exit in wanted:
                    self._add(self._row(llm, start_up, plan, workload, exit))
            except OuroBatchError as error:
                if llm is not None or not isinstance(error, EngineError):
                    raise
                for workload, exit in wanted:
                    self._add(_error_row(workload, exit, schedule, error))
            finally:
                _close(llm)

    def compare(self, plan: Plan, a: str, b: str) -> None:
        """Run settings ``a`` and ``b`` in alternation, A B A B, a pair for each repetition.

        Each is built anew and closed again every time, so that both have the whole memory.
        ``results`` gets a row for each setting, ``comparison`` the ratios B / A of the pairs.
        """
        settings = [parse_setting(a), parse_setting(b)]
        sides = [_side(plan, own) for own in settings]
        rows = []
        self.document.values["comparison"] = {"a": a, "b": b, "rows": rows}
        for workload in plan.workloads:
            for exits in _exit_pairs(plan, settings):
                measured = self._alternate(sides, exits, workload, plan.repetitions)
                for text, row in zip((a, b), measured, strict=True):
                    self._add({**row, "setting": text})
                rows.append(_ratios(workload, exits, measured))
                self.document.write()

    def _alternate(
        self, sides: list[Plan], exits: tuple[str, str], workload: Workload, pairs: int
    ) -> list[dict[str, Any]]:
        found: list[list[dict[str, Any]]] = [[], []]
        for _ in range(pairs):
            for side, exit, own in zip(sides, exits, found, strict=True):
                if own and "error" in own[-1]:
                    continue
                llm = None
                try:
                    llm, start_up = self._open(side, side.schedules[0])
                    own.append(self._row(llm, start_up, side, workload, exit))
                except EngineError as error:
                    own.append(_error_row(workload, exit, side.schedules[0], error))
                finally:
                    _close(llm)
        return [_merged(rows) for rows in found]

    def _open(self, plan: Plan, schedule: str) -> tuple[LLM, dict[str, Any]]:
        """An LLM that has run its first token, and how long that took."""
        first = self._ceilings is None
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        llm = LLM(self.source, **plan.llm_options(schedule), seed=plan.seed)
        try:
            constructed = time.perf_counter()
            tokens = min(16, llm.max_model_len - 1)
            run_pass(llm, [[1] * tokens], [SamplingParams(max_tokens=1, ignore_eos=True)])
            start_up = {
                "construction_s": constructed - started,
                "first_token_s": time.perf_counter() - started,
                # Later LLMs find imports, compiled kernels and the CUDA context in place.
                "process_to_first_token_s": machine.process_age_s() if first else None,
            }
            if first:
                self._ceilings = measure_ceilings(llm.device, llm.dtype)
                self.document.values["machine"] = machine.machine(llm.device)
                self.document.values["ceilings"] = {
                    **self._ceilings.as_json(),
                    "dtype": str(llm.dtype).removeprefix("torch."),
                }
                self.document.write()
        except torch.OutOfMemoryError as error:
            _close(llm)
            raise EngineError(
                f"no memory is left beside the cache: {error} (lower --gpu-memory-utilization)"
            ) from error
        except BaseException:
            _close(llm)
            raise
        return llm, start_up

    def _row(
        self, llm: LLM, start_up: dict[str, Any], plan: Plan, workload: Workload, exit: str
    ) -> dict[str, Any]:
        """Everything about one workload; a workload that cannot run becomes an error row."""
        try:
            requests = Requests.of(
                workload,
                plan.trace if exit == "trace" else None,
                vocabulary=llm.config.vocab_size,
                loops=llm.config.loops,
                seed=plan.seed,
            )
            for _ in range(plan.warmup):
                repetition(llm, requests)
            measured = [repetition(llm, requests) for _ in range(plan.repetitions)]
            row = summary(workload, exit, llm.schedule, measured)
            row |= self._against_floor(llm, workload, requests, row)
            row["start_up"] = start_up
            row |= _memory(llm)
            if exit == "trace":
                row["trace"] = {
                    "shares": dict(
                        zip(map(str, plan.trace.depths), plan.trace.weights, strict=True)
                    ),
                    "mean": plan.trace.mean,
                    "drawn_mean": requests.drawn_depth,
                }
            if plan.profile:
                row["profile"] = profile_steps(llm, requests, plan.profile)
            return row
        except (EngineError, RequestError, torch.OutOfMemoryError) as error:
            return _error_row(workload, exit, llm.schedule, error)

    def _against_floor(
        self, llm: LLM, workload: Workload, requests: Requests, row: dict[str, Any]
    ) -> dict[str, Any]:
        depth = requests.drawn_depth or llm.config.loops
        needed = llm.blocks.needed(workload.input, round(depth * (workload.output - 1)))
        rows = max(min(workload.n, llm.max_rows, llm.blocks.blocks // needed), 1)
        floor = floor_tok_s(
            Costs.of(llm.config, llm.dtype.itemsize),
            self._ceilings,
            rows=rows,
            context=workload.input + workload.output / 2,
            depth=depth,
            lockstep=requests.drawn_depth is None,
        )
        rate = row["decode_tok_s"]
        share = None if rate is None else rate / floor
        return {"floor_tok_s": floor, "floor_rows": rows, "floor_share": share}

    def _add(self, row: dict[str, Any]) -> None:
        self.failed = self.failed or "error" in row
        self.document.results.append(row)
        self.document.write()
        self.say(row_line(row))


def parse_setting(text: str) -> dict[str, Any]:
    """KEY=VALUE,KEY=VALUE of ``COMPARABLE`` options.

    Raises:
        BenchError: another form, an unknown key, or a value of the wrong type.
    """
    found = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or key not in COMPARABLE:
            raise BenchError(
                f"--compare {text!r}: {part!r} is not KEY=VALUE with KEY one of"
                f" {', '.join(COMPARABLE)}"
            )
        try:
            found[key] = COMPARABLE[key](value)
        except ValueError as error:
            kind = "true or false" if COMPARABLE[key] is _truth else "a number"
            raise BenchError(f"--compare {text!r}: {value!r} is not {kind}") from error
    if found.get("exit", "fixed") not in ("fixed", "trace"):
        raise BenchError(f"--compare {text!r}: exit is fixed or trace")
    return found


def summary(
    workload: Workload, exit: str, schedule: str, measured: list[dict[str, Any]]
) -> dict[str, Any]:
    """A result row: medians over the repetitions, and every repetition's own numbers."""
    row: dict[str, Any] = _identity(workload, exit, schedule)
    for key in MEDIANS:
        row[key] = _median([r[key] for r in measured])
    for key in ("ttft_s", "tpot_s", "rows_in_use"):
        row[key] = {name: _median([r[key][name] for r in measured]) for name in measured[0][key]}
    row["rows_in_use"]["max"] = max(r["rows_in_use"]["max"] for r in measured)
    row["repetitions"] = measured
    return row


def _identity(workload: Workload, exit: str, schedule: str) -> dict[str, Any]:
    return {
        "n": workload.n,
        "input": workload.input,
        "output": workload.output,
        "exit": exit,
        "schedule": schedule,
    }


def _error_row(
    workload: Workload, exit: str, schedule: str, error: BaseException
) -> dict[str, Any]:
    return {**_identity(workload, exit, schedule), "error": str(error), "repetitions": []}


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _memory(llm: LLM) -> dict[str, Any]:
    found = llm.statistics()
    return {
        "max_rows": llm.max_rows,
        "max_batched_tokens": llm.max_batched_tokens,
        "attention": llm.attention,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "cache": {key: found["cache"][key] for key in ("bytes", "tokens", "blocks", "block_size")},
        "peak_memory_bytes": found["peak_memory_bytes"],
        "memory_kind": found["memory_kind"],
    }


def _side(plan: Plan, setting: dict[str, Any]) -> Plan:
    """The plan of one side of a comparison: one repetition a time, without profile."""
    options = {k: v for k, v in setting.items() if k not in ("exit", "schedule")}
    return Plan(
        workloads=plan.workloads,
        exits=plan.exits,
        schedules=[setting.get("schedule", plan.schedules[0])],
        trace=plan.trace,
        repetitions=1,
        warmup=plan.warmup,
        seed=plan.seed,
        options={**plan.options, **options},
    )


def _exit_pairs(plan: Plan, settings: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Exits of A and B: those of the settings, otherwise the plan's."""
    pairs = [tuple(own.get("exit", exit) for own in settings) for exit in plan.exits]
    return list(dict.fromkeys(pairs))


def _merged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row from those of all pairs."""
    if "error" in rows[-1]:
        return rows[-1]
    last = rows[-1]
    measured = [one for row in rows for one in row["repetitions"]]
    workload = Workload(last["n"], last["input"], last["output"])
    merged = {**last, **summary(workload, last["exit"], last["schedule"], measured)}
    if merged["decode_tok_s"] is not None:
        merged["floor_share"] = merged["decode_tok_s"] / last["floor_tok_s"]
    return merged


def _ratios(
    workload: Workload, exits: tuple[str, str], measured: list[dict[str, Any]]
) -> dict[str, Any]:
    a, b = (row["repetitions"] for row in measured)
    row: dict[str, Any] = {
        "n": workload.n,
        "input": workload.input,
        "output": workload.output,
        "exit": list(exits),
        "pairs": min(len(a), len(b)),
    }
    for name in ("decode", "end_to_end"):
        rates = [(x[f"{name}_tok_s"], y[f"{name}_tok_s"]) for x, y in zip(a, b, strict=False)]
        ratios = [y / x for x, y in rates if x and y]
        row[name] = None
        if ratios:
            row[name] = {"median": median(ratios), "min": min(ratios), "max": max(ratios)}
            row[name]["ratios"] = ratios
    return row


def _close(llm: LLM | None) -> None:
    """Free an LLM now, cycles included: the next one sizes its cache by what is free."""
    if llm is not None:
        llm.close()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
