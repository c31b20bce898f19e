"""Compiles the attention kernels for a Hopper GPU on a machine that has none.

    python -m tests.kernels.compile_attention

The interpreter runs what the compiler may refuse. Each kernel's launch is caught, and its arguments
become the types and constants that Triton compiles for.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from ouro_batch.kernels import decode_attention as decode
from ouro_batch.kernels import prefill_attention as prefill
from ouro_batch.kernels.decode_work import DecodeWork
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
HEADS, HEAD_DIM = 16, 128


class Compiled:
    """Stands for a kernel: a launch compiles it and runs nothing."""

    def __init__(self, kernel: Any):
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._compile

    def _compile(self, *arguments: Any, **named: Any) -> None:
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        parameters = self._kernel.params
        values = dict(zip((p.name for p in parameters), arguments, strict=False)) | named
        values |= {"UPCAST": False} if "UPCAST" in values else {}  # as on a GPU
        signature, constants, aligned = {}, {}, {}
        for place, parameter in enumerate(parameters):
            value = values[parameter.name]
            if parameter.is_constexpr or value is None:
                signature[parameter.name] = "constexpr"
                constants[(place,)] = value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = TYPES[value.dtype]
                aligned[(place,)] = [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        source = ASTSource(self._kernel, signature, constants, aligned)
        options = {name: value for name, value in options.items() if value is not None}
        compile_source(source, target=GPUTarget("cuda", 90, 32), options=options)
        print(self._kernel.fn.__name__, options)


def catch(module: ModuleType, *names: str) -> None:
    for name in names:
        setattr(module, name, Compiled(getattr(module, name)))


def main() -> None:
    catch(decode, "_decode_kernel", "_merge_kernel")
    catch(prefill, "_prefill_kernel")
    tables = torch.zeros(4, 4, 8, dtype=torch.int32)
    for kv_heads, dtype in ((16, torch.bfloat16), (4, torch.bfloat16), (16, torch.float32)):
        work = DecodeWork.allocate(4, 64, HEADS, kv_heads, HEAD_DIM, torch.device("cpu"))
        queries = torch.zeros(4, HEADS, HEAD_DIM, dtype=dtype)
        keys, values = torch.zeros(2, 8, 16, kv_heads, HEAD_DIM, dtype=dtype)
        out = torch.empty_like(queries)
        for options in ({"overlap": True}, {"fused_merge": False}):
            decode.decode_attention(out, queries, keys, values, tables, tables, work, **options)
        tiles = torch.ones(2, 4, dtype=torch.int32)
        prefill.prefill_attention(out, queries, keys, values, tiles, 0, tables)


if __name__ == "__main__":
    main()
