"""Triton kernels alone: tensors in, tensors out, no import from the rest of the package."""
