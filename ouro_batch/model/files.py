"""Reading the JSON files of a checkpoint folder, with errors that name the file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from ouro_batch.errors import ModelError

SUFFIXES = (".json", ".jinja", ".safetensors")
SAMPLES, SAMPLE_BYTES = 16, 65_536


def check_folder(folder: Path) -> None:
    """Raise ModelError unless ``folder`` is a folder."""
    if not folder.is_dir():
        what = "is a file, not a checkpoint folder" if folder.exists() else "does not exist"
        raise ModelError(f"{folder} {what} (give the folder that holds config.json)")


def fingerprint(folder: Path) -> str:
    """What tells one checkpoint in a folder from another, without reading all of it.

    A hash of its small files, and of the name, size and 16 samples of each file of weights.
    """
    total = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.suffix not in SUFFIXES or not path.is_file():
            continue
        size = path.stat().st_size
        total.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= SAMPLES * SAMPLE_BYTES:
                total.update(file.read())
                continue
            for sample in range(SAMPLES):
                file.seek(sample * (size - SAMPLE_BYTES) // (SAMPLES - 1))
                total.update(file.read(SAMPLE_BYTES))
    return total.hexdigest()


def read_text(path: Path) -> str:
    """The UTF-8 text of ``path``. Raises ModelError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"{path} cannot be read: {error} (check its permissions, or download it again)"
        ) from error


def read_json_object(path: Path) -> dict:
    """The JSON object in ``path``. Raises ModelError where it is unreadable or no object."""
    try:
        value = json.loads(read_text(path))
    except ValueError as error:
        raise ModelError(
            f"{path} is not valid JSON: {error} (the file may be torn; download it again)"
        ) from error
    if not isinstance(value, dict):
        raise ModelError(
            f"{path} must hold a JSON object, got {type(value).__name__} (download it again)"
        )
    return value
