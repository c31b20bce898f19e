"""What several commands share: panels of their help, choices, and whole options."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

from ouro_batch.cli.settings import load
from ouro_batch.jobs.errors import UsageError
from ouro_batch.jobs.records import InputFormat

FILES = "Input and output"
SAMPLING = "Sampling"
EXIT = "Early exit"
ENGINE = "Engine"
MEMORY = "Memory"


class Format(str, Enum):
    json = "json"
    text = "text"


class TooLong(str, Enum):
    error = "error"
    truncate_left = "truncate-left"
    truncate_right = "truncate-right"


class OnDuplicate(str, Enum):
    error = "error"
    keep = "keep"


class Schedule(str, Enum):
    refill = "refill"
    no_refill = "no-refill"
    serial = "serial"


class Attention(str, Enum):
    auto = "auto"
    torch = "torch"
    triton = "triton"


class Dtype(str, Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Resume(str, Enum):
    auto = "auto"
    force = "force"
    never = "never"


def option(panel: str, *names: str, **settings: Any) -> Any:
    """An option in a panel of the command's help."""
    return typer.Option(*names, rich_help_panel=panel, show_envvar=False, **settings)


def input_format(format: Format, prompt_field: str | None, id_field: str | None) -> InputFormat:
    """How lines are read.

    Raises:
        UsageError: one column is to be both prompt and id.
    """
    if prompt_field is not None and prompt_field == id_field:
        raise UsageError(
            f"--prompt-field and --id-field both name {prompt_field!r}: a prompt is no id (leave"
            " --id-field away, and a record has its index for one)"
        )
    return InputFormat(format is Format.text, prompt_field, id_field)


Inputs = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT...",
        help="JSON Lines files with a prompt, messages or an OpenAI batch request a line; .gz,"
        " .zst and .parquet too, or patterns such as 'shards/*.jsonl'; - is standard input.",
    ),
]

Model = Annotated[
    str,
    option(
        FILES,
        "--model",
        "-m",
        metavar="MODEL",
        help="Folder with a checkpoint, or a Hugging Face hub id.",
    ),
]

Revision = Annotated[
    str | None,
    option(
        FILES,
        "--revision",
        metavar="REVISION",
        help="Branch, tag or commit of a hub id.",
        show_default="the pinned commit, or the default branch",
    ),
]

Overwrite = Annotated[bool, option(FILES, "--overwrite", help="Replace an output that exists.")]

Device = Annotated[
    str,
    option(
        ENGINE,
        "--device",
        metavar="DEVICE",
        help="auto (a GPU if there is one), cpu, cuda, cuda:1.",
    ),
]

InputFormatOption = Annotated[
    Format,
    option(
        FILES,
        "--format",
        help="json: an object a line; text: a line is a prompt.",
    ),
]

PromptField = Annotated[
    str | None,
    option(
        FILES,
        "--prompt-field",
        metavar="NAME",
        help="Field that holds the prompt; unknown fields then go into metadata.",
        show_default="prompt",
    ),
]

IdField = Annotated[
    str | None,
    option(
        FILES,
        "--id-field",
        metavar="NAME",
        help="Field that holds the id; unknown fields then go into metadata.",
        show_default="id",
    ),
]

OnDuplicateOption = Annotated[
    OnDuplicate,
    option(
        FILES,
        "--on-duplicate",
        help="What becomes of a line whose id an earlier line has given: an error record, or it"
        " is run like any other.",
    ),
]

OnTooLong = Annotated[
    TooLong,
    option(
        FILES,
        "--on-too-long",
        help="What becomes of a prompt that does not fit beside --max-tokens: an error record,"
        " or it loses its first (left) or last (right) tokens.",
    ),
]

MaxTokens = Annotated[
    int,
    option(SAMPLING, "--max-tokens", metavar="N", help="Tokens to generate at most, per record."),
]

Samples = Annotated[
    int,
    option(
        SAMPLING,
        "--n",
        metavar="N",
        help="Samples of each prompt, each a record with a seed of its own, 1,024 at most.",
    ),
]

ExitThreshold = Annotated[
    float | None,
    option(
        EXIT,
        "--exit-threshold",
        metavar="P",
        help="A token leaves after the loop where its probability of having exited reaches"
        " this, from 0; 1 or more: every token runs all loops.",
        show_default="the checkpoint's",
    ),
]

MinLoops = Annotated[
    int,
    option(EXIT, "--min-loops", metavar="N", help="Loops that every decoded token runs at least."),
]

MaxLoops = Annotated[
    int | None,
    option(
        EXIT,
        "--max-loops",
        metavar="N",
        help="Loops that a decoded token runs at most.",
        show_default="all of the model's",
    ),
]

Quiet = Annotated[
    bool, option(FILES, "--quiet", "-q", help="No progress and no summary, only errors.")
]

ResumeOption = Annotated[
    Resume,
    option(
        FILES,
        "--resume",
        help="What becomes of records that an unfinished job left in OUTPUT.part. auto: they"
        " are kept and the rest is run, if model, settings and lines are the same; force:"
        " even where settings differ, and changed lines are run again; never: start anew.",
    ),
]

Loops = Annotated[
    int | None,
    option(
        EXIT,
        "--loops",
        metavar="N",
        min=1,
        help="Loops of the whole model, for prompts and answers alike.",
        show_default="the checkpoint's",
    ),
]

DtypeOption = Annotated[
    Dtype,
    option(
        ENGINE,
        "--dtype",
        help="Type of weights, activations and cache; auto: float32 on a CPU, the"
        " checkpoint's on a GPU.",
    ),
]

MaxRows = Annotated[
    int | None,
    option(
        ENGINE,
        "--max-rows",
        metavar="N",
        min=1,
        help="Requests that run at once.",
        show_default="256 on a GPU, 64 on a CPU",
    ),
]

MaxBatchedTokens = Annotated[
    int | None,
    option(
        ENGINE,
        "--max-batched-tokens",
        metavar="N",
        min=1,
        help="Tokens of one step, prefill and decode together.",
        show_default="--max-rows and 8,192 on a GPU, 1,024 on a CPU",
    ),
]

MaxModelLen = Annotated[
    int | None,
    option(
        ENGINE,
        "--max-model-len",
        metavar="N",
        min=1,
        help="Tokens of prompt and answer together.",
        show_default="the model's positions",
    ),
]

BlockSize = Annotated[
    int, option(MEMORY, "--block-size", metavar="N", min=1, help="Slots of a cache block.")
]

GpuMemoryUtilization = Annotated[
    float,
    option(
        MEMORY,
        "--gpu-memory-utilization",
        metavar="SHARE",
        help="Share of the GPU's memory for weights and cache, above 0 and at most 1.",
    ),
]

Config = Annotated[
    str | None,
    option(
        FILES,
        "--config",
        metavar="FILE",
        callback=load,
        is_eager=True,
        expose_value=False,
        help="TOML file with a table for each command; what it says counts less than variables"
        " OURO_BATCH_COMMAND_OPTION, and those less than the command line.",
        show_default="none",
    ),
]
