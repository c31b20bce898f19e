"""Where a model's files are: a local folder, or a hub repository's snapshot at a known commit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ouro_batch.errors import ModelError

PINNED_REVISIONS = {"ByteDance/Ouro-1.4B": "574fa66cb8bf5abdc979642d01cf2b79b16bfab1"}

# Weights, configuration and tokenizer alone: neither pickle nor code ever reaches the disk.
FILE_PATTERNS = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
IGNORED_PATTERNS = ("*/*",)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk: its folder, the name it was asked for by, and its commit if any."""

    folder: Path
    name: str
    revision: str | None


def resolve(model: str, revision: str | None = None) -> Checkpoint:
    """Find ``model``, a local folder or a hub id, downloading what the cache lacks.

    A hub id without ``revision`` takes its pinned revision, or else the default branch. The
    result's ``revision`` is always the commit that the name stood for. Without a network the cache
    answers.

    Raises:
        ModelError: no such folder, or the hub and the cache cannot give the model.
    """
    if not model:
        raise ModelError(
            "no model is given (give a folder, or a hub id such as ByteDance/Ouro-1.4B)"
        )
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ModelError(
                f"{model} is a local folder, which has no revision {revision!r}"
                " (leave --revision out, or give a hub id)"
            )
        return Checkpoint(folder, model, None)
    if folder.exists():
        raise ModelError(f"{model} is a file (give the folder that holds config.json)")
    if model.startswith((".", "~")) or folder.is_absolute() or model.count("/") > 1:
        raise ModelError(
            f"there is no model folder {model!r} (check the path, or give a hub id such as"
            " ByteDance/Ouro-1.4B)"
        )
    revision = revision or PINNED_REVISIONS.get(model)
    snapshot = _snapshot(model, revision)
    return Checkpoint(snapshot, model, snapshot.name)


def _snapshot(model: str, revision: str | None) -> Path:
    """The folder of the repository's snapshot in the cache; its name is the commit."""
    import huggingface_hub  # a local folder needs neither it nor the time its import takes

    try:
        folder = huggingface_hub.snapshot_download(
            model,
            revision=revision,
            allow_patterns=list(FILE_PATTERNS),
            ignore_patterns=list(IGNORED_PATTERNS),
        )
    except Exception as error:  # what a failed download raises differs between its HTTP clients
        at = f" at revision {revision}" if revision else ""
        raise ModelError(
            f"model {model}{at} is no local folder and cannot be had from the hub:"
            f" {_first_line(error)} ({_way_out(error)})"
        ) from error
    return Path(folder)


def _way_out(error: Exception) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return "accept the model's terms on its page, then log in with `hf auth login` or HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return "give --revision a branch, tag or commit that the repository has"
    if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
        return "check the name; a private repository needs `hf auth login` or HF_TOKEN"
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set and the cache lacks it: unset it once to download the model"
    return "check the name and the network; a model in the cache needs no network"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
