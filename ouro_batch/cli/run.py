"""``ouro-batch run``: its options, and what they mean to a batch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from ouro_batch.cli.messages import Messages
from ouro_batch.cli.shared import (
    ENGINE,
    FILES,
    MEMORY,
    SAMPLING,
    Attention,
    BlockSize,
    Config,
    Device,
    Dtype,
    DtypeOption,
    ExitThreshold,
    Format,
    GpuMemoryUtilization,
    IdField,
    InputFormatOption,
    Inputs,
    Loops,
    MaxBatchedTokens,
    MaxLoops,
    MaxModelLen,
    MaxRows,
    MaxTokens,
    MinLoops,
    Model,
    OnDuplicate,
    OnDuplicateOption,
    OnTooLong,
    Overwrite,
    PromptField,
    Quiet,
    Resume,
    ResumeOption,
    Revision,
    Samples,
    Schedule,
    TooLong,
    input_format,
    option,
)
from ouro_batch.errors import RequestError
from ouro_batch.jobs.batch import BatchOptions, ExitStatus, run_batch
from ouro_batch.jobs.errors import UsageError
from ouro_batch.jobs.writer import STDOUT
from ouro_batch.params import MAX_SEED, SamplingParams

if TYPE_CHECKING:
    from ouro_batch.llm import LLM


def run(
    inputs: Inputs,
    model: Model,
    revision: Revision = None,
    format: InputFormatOption = Format.json,
    prompt_field: PromptField = None,
    id_field: IdField = None,
    output: Annotated[
        str,
        option(
            FILES,
            "--output",
            "-o",
            metavar="FILE",
            help="File for the output records, in input order; - is standard output, as they"
            " finish.",
        ),
    ] = STDOUT,
    ordered: Annotated[
        bool,
        option(
            FILES,
            "--ordered/--no-ordered",
            help="Whether a file's records are in input order or as they finished.",
        ),
    ] = True,
    overwrite: Overwrite = False,
    resume: ResumeOption = Resume.auto,
    retry_errors: Annotated[
        bool,
        option(
            FILES,
            "--retry-errors",
            help="Run the failed records of OUTPUT, or of OUTPUT.part, again and keep the others;"
            " give the options and input of that job.",
        ),
    ] = False,
    on_duplicate: OnDuplicateOption = OnDuplicate.error,
    on_too_long: OnTooLong = TooLong.error,
    max_errors: Annotated[
        int | None,
        option(
            FILES,
            "--max-errors",
            metavar="N",
            min=1,
            help="Stop once this many records have failed in this run.",
            show_default="never",
        ),
    ] = None,
    fail_fast: Annotated[
        bool, option(FILES, "--fail-fast", help="Stop at the first failed record.")
    ] = False,
    token_ids: Annotated[
        bool, option(FILES, "--token-ids", help="Put token ids into the output records.")
    ] = False,
    stats: Annotated[
        str | None,
        option(
            FILES,
            "--stats",
            metavar="FILE",
            help="File for the job's statistics, replaced if it exists.",
            show_default="OUTPUT.stats.json; none for -",
        ),
    ] = None,
    preview: Annotated[
        int | None,
        option(
            FILES,
            "--preview",
            metavar="N",
            min=0,
            help="Answers to show at the end, each token coloured by its exit depth.",
            show_default="5 on a terminal, else 0",
        ),
    ] = None,
    quiet: Quiet = False,
    max_tokens: MaxTokens = SamplingParams.max_tokens,
    temperature: Annotated[
        float,
        option(
            SAMPLING, "--temperature", metavar="T", help="Logits are divided by it; 0 is greedy."
        ),
    ] = SamplingParams.temperature,
    top_p: Annotated[
        float,
        option(
            SAMPLING,
            "--top-p",
            metavar="P",
            help="Sample from the likeliest tokens that reach this probability together, above 0"
            " and at most 1.",
        ),
    ] = SamplingParams.top_p,
    top_k: Annotated[
        int,
        option(
            SAMPLING,
            "--top-k",
            metavar="N",
            help="Sample from this many of the likeliest tokens; 0: all.",
        ),
    ] = SamplingParams.top_k,
    n: Samples = SamplingParams.n,
    logprobs: Annotated[
        int | None,
        option(
            SAMPLING,
            "--logprobs",
            metavar="K",
            help="Give each token's log-probability and those of the K likeliest tokens, 0 to 20.",
            show_default="none",
        ),
    ] = None,
    seed: Annotated[
        int,
        option(
            SAMPLING,
            "--seed",
            metavar="N",
            min=0,
            max=MAX_SEED,
            help="Seed of the job; records without a seed derive theirs from it and their index.",
        ),
    ] = 0,
    stop: Annotated[
        list[str] | None,
        option(
            SAMPLING,
            "--stop",
            metavar="TEXT",
            help="Text that ends an answer and is left out of it; may be given several times.",
            show_default="none",
        ),
    ] = None,
    stop_token_id: Annotated[
        list[int] | None,
        option(
            SAMPLING,
            "--stop-token-id",
            metavar="ID",
            help="Token id that ends an answer; may be given several times.",
            show_default="the model's end tokens only",
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, option(SAMPLING, "--ignore-eos", help="Run past the model's end tokens.")
    ] = False,
    exit_threshold: ExitThreshold = None,
    min_loops: MinLoops = SamplingParams.min_loops,
    max_loops: MaxLoops = None,
    loops: Loops = None,
    schedule: Annotated[
        Schedule,
        option(
            ENGINE,
            "--schedule",
            help="refill: a row whose token exits starts its next token at once; no-refill: rows"
            " wait for each other; serial: one request at a time.",
        ),
    ] = Schedule.refill,
    attention: Annotated[
        Attention, option(ENGINE, "--attention", help="Attention implementation.")
    ] = Attention.auto,
    device: Device = "auto",
    dtype: DtypeOption = Dtype.auto,
    max_rows: MaxRows = None,
    max_batched_tokens: MaxBatchedTokens = None,
    max_model_len: MaxModelLen = None,
    batch_invariant: Annotated[
        bool,
        option(
            ENGINE,
            "--batch-invariant",
            help="The same results, bit for bit, whatever shares the batch; slower on a CPU.",
        ),
    ] = False,
    block_size: BlockSize = 16,
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
    gpu_memory_utilization: GpuMemoryUtilization = 0.9,
    config: Config = None,
) -> None:
    """Run prompts through a looped model: one JSON record in, one out.

    Exit status: 0 all done, 1 some records failed, 2 wrong use, 3 the engine could not run,
    130 interrupted.
    """
    console = Messages()
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "stop": stop or [],
        "stop_token_ids": stop_token_id or [],
        "ignore_eos": ignore_eos,
        "exit_threshold": exit_threshold,
        "min_loops": min_loops,
        "max_loops": max_loops,
        "n": n,
        "logprobs": logprobs,
    }
    engine = {
        "revision": revision,
        "device": device,
        "dtype": dtype.value,
        "attention": attention.value,
        "schedule": schedule.value,
        "loops": loops,
        "max_rows": max_rows,
        "max_batched_tokens": max_batched_tokens,
        "block_size": block_size,
        "kv_tokens": kv_tokens,
        "kv_memory": kv_memory,
        "gpu_memory_utilization": gpu_memory_utilization,
        "max_model_len": max_model_len,
        "batch_invariant": batch_invariant,
        "seed": seed,
    }
    if quiet:
        # A download would draw its own progress bars.
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    try:
        _check_memory(kv_tokens, kv_memory, gpu_memory_utilization)
        options = BatchOptions(
            model=model,
            inputs=inputs,
            output=output,
            sampling=sampling,
            recorded={"model": model, **engine},
            format=input_format(format, prompt_field, id_field),
            unique_ids=on_duplicate is OnDuplicate.error,
            ordered=ordered,
            too_long=on_too_long.value,
            token_ids=token_ids,
            overwrite=overwrite,
            resume=resume.value,
            retry_errors=retry_errors,
            max_errors=1 if fail_fast else max_errors,
            quiet=quiet,
            statistics=stats,
            preview=preview,
        )
        status = run_batch(options, lambda: _load(model, engine), console)
    except (UsageError, RequestError) as error:
        console.print(Text(f"error: {error}", "bold red"), soft_wrap=True)
        status = ExitStatus.USAGE
    raise typer.Exit(status)


def _check_memory(kv_tokens: int | None, kv_memory: float | None, utilization: float) -> None:
    """Refuse here what the engine would refuse only after the model was loaded."""
    if kv_tokens is not None and kv_memory is not None:
        raise UsageError("--kv-tokens and --kv-memory both size the cache: give one of them")
    if kv_memory is not None and not kv_memory > 0:
        raise UsageError(f"--kv-memory must be above 0 GiB, got {kv_memory}")
    if not 0 < utilization <= 1:
        raise UsageError(
            f"--gpu-memory-utilization must be above 0 and at most 1, got {utilization}"
        )


def _load(model: str, engine: dict[str, Any]) -> LLM:
    # torch takes seconds to import, and most wrong commands are found out without it.
    from ouro_batch.llm import LLM

    return LLM(model, **engine)
