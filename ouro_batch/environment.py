"""What this runs on: versions of the package and of what it stands on."""

from __future__ import annotations

import os
import platform
from importlib import metadata

PACKAGES = ("ouro-batch", "torch", "triton", "tokenizers", "safetensors", "huggingface_hub")


def versions() -> dict[str, str | None]:
    """Installed versions by package name, None where it is not installed, and Python's."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def as_text(path: str | os.PathLike[str]) -> str:
    """A path that can be written down: bytes in it that are no text as escapes."""
    return os.fspath(path).encode(errors="backslashreplace").decode()
