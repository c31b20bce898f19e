"""Kernels against plain torch in FP64: on the CPU under the interpreter, in full on a GPU."""
