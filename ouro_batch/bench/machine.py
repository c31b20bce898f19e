"""What a measurement ran on: machine, versions, and the commit of the source tree."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

import ouro_batch
from ouro_batch import environment

COMMIT_VARIABLE = "OURO_BATCH_COMMIT"


def machine(device: torch.device) -> dict[str, Any]:
    """GPU (null on a CPU), CPU and memory, in bytes; ready for JSON."""
    gpu = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        }
    return {
        "gpu": gpu,
        "cpu": cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": platform.platform(),
    }


def versions() -> dict[str, str | None]:
    """Versions by name, the source tree's own for this package; ``cuda`` is torch's."""
    return {
        **environment.versions(),
        "ouro-batch": ouro_batch.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def commit(root: Path | None = None) -> str | None:
    """``git describe`` of the source tree, ending in -dirty with uncommitted changes.

    The variable OURO_BATCH_COMMIT goes first: a copy of a tree on another machine may not know
    its own commit. None where neither says.
    """
    if named := os.environ.get(COMMIT_VARIABLE):
        return named
    root = root or Path(ouro_batch.__file__).parents[1]
    if (root / ".git").exists():
        described = _output(
            "git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"
        )
        if described:
            return described
    return None


def process_age_s() -> float | None:
    """Seconds since this process was started; None where the system does not tell."""
    try:
        # Fields after the parenthesised name, which may hold blanks; the start is field 22.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def cpu_name() -> str:
    """The processor's model name, as far as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _output(*command: str) -> str | None:
    """First line that a command prints, None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0] or None
