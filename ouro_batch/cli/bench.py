"""``ouro-batch bench``: its options, and what they mean to a benchmark."""

from __future__ import annotations

import sys
from enum import Enum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ouro_batch.bench.workload import (
    DEFAULT_TRACE,
    BenchError,
    parse_trace,
    parse_workloads,
)
from ouro_batch.cli.messages import Messages
from ouro_batch.cli.shared import ENGINE, MEMORY, Attention, Config, Dtype, Schedule, option
from ouro_batch.errors import EngineError, ModelError, RequestError

STDOUT = "-"
DONE, SOME_FAILED, USAGE, ENGINE_FAILED, INTERRUPTED = 0, 1, 2, 3, 130

WHAT = "What is measured"
OUTPUT = "Output"


class Exit(str, Enum):
    fixed = "fixed"
    trace = "trace"


def bench(
    shape: Annotated[
        str | None,
        option(
            WHAT,
            "--shape",
            metavar="NAME",
            help="Random weights of this shape: ouro-1.4b, ouro-2.6b, or tiny (runs on a CPU).",
            show_default="ouro-1.4b, unless --model is given",
        ),
    ] = None,
    model: Annotated[
        str | None,
        option(
            WHAT,
            "--model",
            "-m",
            metavar="MODEL",
            help="Folder with a checkpoint, or a Hugging Face hub id, instead of a shape.",
            show_default="none",
        ),
    ] = None,
    revision: Annotated[
        str | None,
        option(
            WHAT,
            "--revision",
            metavar="REVISION",
            help="Branch, tag or commit of a hub id.",
            show_default="the pinned commit, or the default branch",
        ),
    ] = None,
    workload: Annotated[
        list[str] | None,
        option(
            WHAT,
            "--workload",
            "-w",
            metavar="NxIN/OUT",
            help="N prompts of IN random tokens, OUT tokens generated each, such as 8x1024/128;"
            " table: the eight of the project's table. May be given several times.",
            show_default="table",
        ),
    ] = None,
    exit: Annotated[
        list[Exit] | None,
        option(
            WHAT,
            "--exit",
            help="fixed: every token runs all loops; trace: depths drawn per token from --trace."
            " May be given several times.",
            show_default="both",
        ),
    ] = None,
    trace: Annotated[
        str,
        option(
            WHAT,
            "--trace",
            metavar="DEPTH:SHARE,...",
            help="Exit depths in loops and their shares, which add up to 1.",
        ),
    ] = DEFAULT_TRACE,
    schedule: Annotated[
        list[Schedule] | None,
        option(
            WHAT,
            "--schedule",
            help="refill, no-refill or serial; may be given several times.",
            show_default="refill",
        ),
    ] = None,
    repetitions: Annotated[
        int,
        option(
            WHAT,
            "--repetitions",
            metavar="N",
            min=1,
            help="Measured repetitions of each row, or pairs of a comparison.",
        ),
    ] = 3,
    warmup: Annotated[
        int,
        option(WHAT, "--warmup", metavar="N", min=0, help="Repetitions before that, not measured."),
    ] = 1,
    compare: Annotated[
        tuple[str, str] | None,
        option(
            WHAT,
            "--compare",
            metavar="A B",
            help="Run two settings in alternation and give the ratio B / A of their rates. Each is"
            " KEY=VALUE,... of exit, schedule and engine options, such as schedule=no-refill"
            " schedule=refill.",
            show_default="none",
        ),
    ] = None,
    profile: Annotated[
        bool,
        option(WHAT, "--profile", help="Name where a decode step's time goes, by kernel, in us."),
    ] = False,
    profile_steps: Annotated[
        int,
        option(WHAT, "--profile-steps", metavar="N", min=1, help="Engine steps that it profiles."),
    ] = 16,
    seed: Annotated[
        int,
        option(
            WHAT, "--seed", metavar="N", min=0, help="Seed of weights, prompts and drawn depths."
        ),
    ] = 0,
    output: Annotated[
        str | None,
        option(
            OUTPUT,
            "--output",
            "-o",
            metavar="FILE",
            help="JSON file with every number, replaced after each row; - is standard output,"
            " instead of the tables.",
            show_default="none",
        ),
    ] = None,
    quiet: Annotated[
        bool, option(OUTPUT, "--quiet", "-q", help="No line for each row, only errors.")
    ] = False,
    attention: Annotated[
        Attention, option(ENGINE, "--attention", help="Attention implementation.")
    ] = Attention.auto,
    device: Annotated[
        str,
        option(
            ENGINE,
            "--device",
            metavar="DEVICE",
            help="auto (a GPU if there is one), cpu, cuda, cuda:1.",
        ),
    ] = "auto",
    dtype: Annotated[
        Dtype,
        option(
            ENGINE,
            "--dtype",
            help="Type of weights, activations and cache; auto: float32 on a CPU, the"
            " checkpoint's (bfloat16 for a shape) on a GPU.",
        ),
    ] = Dtype.auto,
    loops: Annotated[
        int | None,
        option(
            ENGINE,
            "--loops",
            metavar="N",
            min=1,
            help="Loops of the whole model, for prompts and answers alike.",
            show_default="the model's",
        ),
    ] = None,
    max_rows: Annotated[
        int | None,
        option(
            ENGINE,
            "--max-rows",
            metavar="N",
            min=1,
            help="Requests that run at once.",
            show_default="the largest N of the workloads",
        ),
    ] = None,
    max_batched_tokens: Annotated[
        int | None,
        option(
            ENGINE,
            "--max-batched-tokens",
            metavar="N",
            min=1,
            help="Tokens of one step, prefill and decode together.",
            show_default="--max-rows and 8,192 on a GPU, 1,024 on a CPU",
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        option(
            ENGINE,
            "--max-model-len",
            metavar="N",
            min=1,
            help="Tokens of prompt and answer together.",
            show_default="the longest workload's",
        ),
    ] = None,
    block_size: Annotated[
        int, option(MEMORY, "--block-size", metavar="N", min=1, help="Slots of a cache block.")
    ] = 16,
    kv_tokens: Annotated[
        int | None,
        option(
            MEMORY,
            "--kv-tokens",
            metavar="N",
            min=1,
            help="Size of the cache in tokens of full depth.",
            show_default="what memory allows",
        ),
    ] = None,
    kv_memory: Annotated[
        float | None,
        option(
            MEMORY,
            "--kv-memory",
            metavar="GIB",
            help="Size of the cache in GiB; not together with --kv-tokens.",
            show_default="what --gpu-memory-utilization leaves; on a CPU a quarter of what is free",
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float,
        option(
            MEMORY,
            "--gpu-memory-utilization",
            metavar="SHARE",
            help="Share of the GPU's memory for weights and cache, above 0 and at most 1.",
        ),
    ] = 0.9,
    config: Config = None,
) -> None:
    """Measure speed: workloads in, tokens per second and their share of the machine's floor out.

    Exit status: 0 all measured, 1 some rows failed, 2 wrong use, 3 the model or engine could not
    run, 130 interrupted (the rows measured so far are in --output).
    """
    console = Messages()
    settings = {
        "shape": shape if shape or model else "ouro-1.4b",
        "model": model,
        "revision": revision,
        "workloads": workload or ["table"],
        "exits": [e.value for e in exit or Exit],
        "schedules": [s.value for s in schedule or [Schedule.refill]],
        "trace": trace,
        "repetitions": repetitions,
        "warmup": warmup,
        "compare": compare and list(compare),
        "profile": profile_steps if profile else 0,
        "seed": seed,
        "engine": {
            "attention": attention.value,
            "device": device,
            "dtype": dtype.value,
            "loops": loops,
            "max_rows": max_rows,
            "max_batched_tokens": max_batched_tokens,
            "max_model_len": max_model_len,
            "block_size": block_size,
            "kv_tokens": kv_tokens,
            "kv_memory": kv_memory,
            "gpu_memory_utilization": gpu_memory_utilization,
        },
    }
    try:
        status = _measure(settings, output, quiet, console)
    except (BenchError, RequestError) as error:
        status = _complain(console, error, USAGE)
    except (ModelError, EngineError) as error:
        status = _complain(console, error, ENGINE_FAILED)
    except KeyboardInterrupt:
        status = INTERRUPTED
    raise typer.Exit(status)


def _measure(settings: dict[str, Any], output: str | None, quiet: bool, console: Console) -> int:
    workloads = parse_workloads(settings["workloads"])
    trace = parse_trace(settings["trace"])
    if settings["model"] and settings["shape"]:
        raise BenchError("--model and --shape both name what runs: give one of them")
    # torch takes seconds to import, and most wrong commands are found out without it.
    from ouro_batch.bench import machine
    from ouro_batch.bench.report import Document, print_results
    from ouro_batch.bench.session import Bench, Plan, parse_setting
    from ouro_batch.bench.shapes import random_source
    from ouro_batch.model.source import CheckpointSource

    for text in settings["compare"] or ():
        parse_setting(text)
    if settings["model"]:
        source = CheckpointSource(settings["model"], settings["revision"])
    else:
        source = random_source(settings["shape"], settings["seed"])
    head = {
        "machine": None,
        "versions": machine.versions(),
        "commit": machine.commit(),
        "command": ["ouro-batch", *sys.argv[1:]],
        "settings": settings,
        "ceilings": None,
    }
    document = Document(output, head)
    plan = Plan(
        workloads=workloads,
        exits=settings["exits"],
        schedules=settings["schedules"],
        trace=trace,
        repetitions=settings["repetitions"],
        warmup=settings["warmup"],
        profile=settings["profile"],
        seed=settings["seed"],
        options=settings["engine"],
    )

    def say(line: str) -> None:
        if not quiet:
            console.print(Text(line), soft_wrap=True)

    if settings["shape"] not in (None, "tiny"):
        from ouro_batch.options import resolve_device

        if resolve_device(settings["engine"]["device"]).type == "cpu":
            say("note: this shape takes long on a CPU; --shape tiny takes seconds")
    session = Bench(source, document, say)
    if settings["compare"]:
        session.compare(plan, *settings["compare"])
    else:
        session.run(plan)
    if output == STDOUT:
        sys.stdout.write(document.text())
    else:
        # Fifteen columns; into a file or a pipe they need not fit a terminal.
        width = None if sys.stdout.isatty() else 160
        print_results(Console(highlight=False, width=width), document.values)
    return SOME_FAILED if session.failed else DONE


def _complain(console: Console, error: Exception, status: int) -> int:
    console.print(Text(f"error: {error}", "bold red"), soft_wrap=True)
    return status
