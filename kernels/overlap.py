"""Programmatic dependent launch: a kernel's start overlaps the end of the kernel before it.

A kernel launched with ``overlapped(True)`` may start as soon as every program of the kernel before
it has called ``join`` or ended. It calls ``join`` itself before it reads what the kernel before it
wrote, and before it writes anything. Since that kernel had joined too, all that came earlier has
ended by then: constants and what earlier kernels wrote may be read before ``join``. A kernel
launched the plain way waits for everything, as ever. Hopper and later GPUs only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # Triton before 3.4: ``can_overlap`` is False
    gdc_launch_dependents = gdc_wait = None


@triton.jit
def join(OVERLAP: tl.constexpr):
    """Wait for the kernel before this one to end, and let the next one start."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


def can_overlap(device: torch.device) -> bool:
    """Whether the device and this Triton know programmatic dependent launch."""
    if device.type != "cuda" or gdc_wait is None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def overlapped(overlap: bool) -> dict[str, bool]:
    """Launch options that go with a kernel's ``OVERLAP`` parameter."""
    return {"OVERLAP": True, "launch_pdl": True} if overlap else {"OVERLAP": False}
