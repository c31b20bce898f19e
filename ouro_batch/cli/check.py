"""``ouro-batch check``: what running an input would take, and what is wrong with it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ouro_batch.cli.messages import Messages
from ouro_batch.cli.shared import (
    FILES,
    MEMORY,
    BlockSize,
    Config,
    Dtype,
    DtypeOption,
    Format,
    GpuMemoryUtilization,
    IdField,
    InputFormatOption,
    Inputs,
    Loops,
    MaxBatchedTokens,
    MaxModelLen,
    MaxRows,
    MaxTokens,
    Model,
    OnDuplicate,
    OnDuplicateOption,
    OnTooLong,
    PromptField,
    Revision,
    Samples,
    TooLong,
    input_format,
    option,
)
from ouro_batch.errors import ModelError, RequestError
from ouro_batch.jobs.batch import ExitStatus
from ouro_batch.jobs.errors import FileError, UsageError
from ouro_batch.jobs.reader import check_inputs, expand_inputs
from ouro_batch.jobs.records import InputFormat
from ouro_batch.params import SamplingParams

if TYPE_CHECKING:
    from ouro_batch.jobs.check import Capacity, Findings

GIB = 2**30
BAR = 40


def check(
    inputs: Inputs,
    model: Model,
    revision: Revision = None,
    format: InputFormatOption = Format.json,
    prompt_field: PromptField = None,
    id_field: IdField = None,
    on_duplicate: OnDuplicateOption = OnDuplicate.error,
    on_too_long: OnTooLong = TooLong.error,
    score: Annotated[
        bool,
        option(FILES, "--score", help="Check lines for score: with completions, nothing decoded."),
    ] = False,
    limit: Annotated[
        int, option(FILES, "--limit", metavar="N", min=0, help="Problems to show.")
    ] = 20,
    json: Annotated[
        bool, option(FILES, "--json", help="Print the findings as JSON instead of tables.")
    ] = False,
    max_tokens: MaxTokens = SamplingParams.max_tokens,
    n: Samples = SamplingParams.n,
    loops: Loops = None,
    dtype: DtypeOption = Dtype.auto,
    max_rows: MaxRows = None,
    max_batched_tokens: MaxBatchedTokens = None,
    max_model_len: MaxModelLen = None,
    block_size: BlockSize = 16,
    gpu_memory: Annotated[
        float | None,
        option(
            MEMORY,
            "--gpu-memory",
            metavar="GIB",
            min=0.0,
            help="Memory in GiB of the GPU that the job will run on.",
            show_default="this machine's GPU; without one, memory is not checked",
        ),
    ] = None,
    gpu_memory_utilization: GpuMemoryUtilization = 0.9,
    config: Config = None,
) -> None:
    """Read an input without running it: problems line by line, lengths, memory and work.

    Exit status: 0 every line can run, 1 some cannot, 2 wrong use, 3 a file or model could not be
    read.
    """
    messages = Messages()
    try:
        if not 0 < gpu_memory_utilization <= 1:
            raise UsageError(
                "--gpu-memory-utilization must be above 0 and at most 1,"
                f" got {gpu_memory_utilization}"
            )
        form = input_format(format, prompt_field, id_field)
        for note in form.without_effect:
            messages.print(Text(f"note: {note}", "yellow"), soft_wrap=True)
        inputs = expand_inputs(inputs)
        found, room = _check(
            inputs,
            model,
            revision,
            form,
            gpu_memory=gpu_memory,
            utilization=gpu_memory_utilization,
            rows=max_rows or 256,
            batched_tokens=max_batched_tokens,
            dtype=dtype.value,
            options={
                "defaults": {"max_tokens": max_tokens, "n": n},
                "unique_ids": not score and on_duplicate is OnDuplicate.error,
                "too_long": on_too_long.value,
                "loops": loops,
                "max_model_len": max_model_len,
                "block_size": block_size,
                "keep": limit,
                "score": score,
            },
        )
    except (UsageError, RequestError) as error:
        messages.print(Text(f"error: {error}", "bold red"), soft_wrap=True)
        raise typer.Exit(ExitStatus.USAGE) from None
    except (FileError, ModelError) as error:
        messages.print(Text(f"error: {error}", "bold red"), soft_wrap=True)
        raise typer.Exit(ExitStatus.ENGINE) from None
    if json:
        numbers = orjson.dumps(_as_json(found, room), option=orjson.OPT_INDENT_2)
        sys.stdout.write(numbers.decode() + "\n")
    else:
        _print(Console(highlight=False), found, room, several=len(inputs) > 1)
    raise typer.Exit(ExitStatus.SOME_FAILED if found.failed else ExitStatus.DONE)


def _check(
    inputs: list[str],
    model: str,
    revision: str | None,
    format: InputFormat,
    *,
    gpu_memory: float | None,
    utilization: float,
    rows: int,
    batched_tokens: int | None,
    dtype: str,
    options: dict[str, Any],
) -> tuple[Findings, Capacity | None]:
    SamplingParams(**options["defaults"])
    check_inputs(inputs, text=format.text)
    # torch and the tokenizer take seconds to import.
    import torch

    from ouro_batch.jobs.check import InputCheck, capacity, resolve_cache_dtype
    from ouro_batch.model.source import CheckpointSource

    source = CheckpointSource(model, revision)
    gpu_bytes = None if gpu_memory is None else int(gpu_memory * GIB)
    if gpu_bytes is None and torch.cuda.is_available():
        gpu_bytes = torch.cuda.mem_get_info()[1]
    room = None
    if gpu_bytes is not None:
        room = capacity(
            source.config,
            resolve_cache_dtype(dtype, source.config),
            gpu_bytes=gpu_bytes,
            utilization=utilization,
            rows=rows,
            batched_tokens=batched_tokens or 8192,
        )
    return InputCheck(source, format=format, room=room, **options).read(inputs), room


def _as_json(found: Findings, room: Capacity | None) -> dict[str, Any]:
    tokens, line, file = found.longest
    return {
        "lines": found.lines,
        "samples": found.samples,
        "problems": {
            "total": found.failed,
            "by_type": dict(found.problem_types),
            "first": [dict(vars(problem)) for problem in found.problems],
        },
        "prompt_tokens": {
            "total": found.prompt_tokens,
            **{f"p{p}": found.percentile(p) for p in (50, 90, 99)},
            "longest": {"tokens": tokens, "line": line, "file": file} if tokens else None,
            "truncated_lines": found.truncated,
            "histogram": [
                {"from": low, "to": high, "lines": lines} for low, high, lines in found.histogram()
            ],
        },
        "output_tokens_at_most": found.output_tokens,
        "cache": {
            "largest_request_tokens": found.largest,
            "mean_request_tokens": found.cache_tokens / found.samples if found.samples else None,
            "gpu": room
            and {
                "gpu_bytes": room.gpu_bytes,
                "weight_bytes": room.weight_bytes,
                "cache_bytes": room.cache_bytes,
                "cache_tokens": room.tokens,
                "requests_at_once": _at_once(found, room),
            },
        },
        "operations_at_full_depth": {
            "prefill": found.prefill_operations,
            "decode_at_most": found.decode_operations,
        },
    }


def _at_once(found: Findings, room: Capacity) -> int | None:
    if not found.samples:
        return None
    if not found.cache_tokens:
        return found.samples
    return min(int(room.tokens / (found.cache_tokens / found.samples)), found.samples)


def _print(console: Console, found: Findings, room: Capacity | None, *, several: bool) -> None:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column()
    good = found.lines - found.failed
    lines = Text(f"{good:,} of {found.lines:,} can run", "green" if not found.failed else "")
    if found.samples != good:
        lines.append(f", {found.samples:,} samples", "default")
    facts.add_row("lines", lines)
    if found.failed:
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in found.problem_types.most_common())
        facts.add_row("problems", Text(f"{found.failed:,} ({kinds})", "bold red"))
    if found.truncated:
        facts.add_row("truncated", f"{found.truncated:,} prompts would lose tokens")
    if found.samples:
        tokens, line, file = found.longest
        where = f"line {line}" + (f" of {file}" if several else "")
        facts.add_row(
            "prompt tokens",
            f"{found.prompt_tokens:,} in all; median {found.percentile(50):,}, 99% up to"
            f" {found.percentile(99):,}, longest {tokens:,} ({where})",
        )
        facts.add_row("output tokens", f"{found.output_tokens:,} at most")
        if found.cache_tokens:  # none where completions are scored
            facts.add_row("cache", _cache(found, room))
        facts.add_row(
            "work",
            f"{found.prefill_operations / 1e12:,.2f} TFLOP for prompts,"
            f" {found.decode_operations / 1e12:,.2f} for answers at full depth and length",
        )
    console.print(facts)
    if found.prompt_lengths:
        console.print()
        console.print(_bars(found))
    if found.problems:
        console.print()
        _print_problems(console, found, several)


def _cache(found: Findings, room: Capacity | None) -> str:
    largest = f"a request needs up to {found.largest:,} tokens"
    if room is None:
        return f"{largest} (give --gpu-memory to see what fits)"
    fit = _at_once(found, room)
    at_once = f"{fit:,} requests of mean size at once"
    if fit == found.samples:
        at_once = "all requests at once"
    return (
        f"{largest}; {_size(room.gpu_bytes)} hold weights of"
        f" {_size(room.weight_bytes)} and about {room.tokens:,} tokens, {at_once}"
    )


def _size(count: int) -> str:
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / 2**20:,.1f} MiB"


def _bars(found: Findings) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("prompt tokens", justify="right")
    table.add_column("lines", justify="right")
    table.add_column("")
    bins = found.histogram()
    most = max(lines for _, _, lines in bins)
    for low, high, lines in bins:
        span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        width = -(-lines * BAR // most)
        table.add_row(span, f"{lines:,}", Text("█" * width, "cyan"))
    return table


def _print_problems(console: Console, found: Findings, several: bool) -> None:
    for problem in found.problems:
        where = f"{problem.file}:{problem.line}" if several else f"line {problem.line}"
        console.print(Text.assemble((where, "bold"), f"  {problem.message}"), soft_wrap=True)
    more = found.failed - len(found.problems)
    if more:
        console.print(Text(f"and {more:,} more (see --limit)", "dim"))
