"""What the interpreter cannot show: that the compiler takes the kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_attention_compiles_for_a_gpu(tmp_path):
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ |= {"TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_attention"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    for kernel, times in (("_decode_kernel", 6), ("_merge_kernel", 3), ("_prefill_kernel", 3)):
        assert result.stdout.count(kernel) == times
