"""Kernels in Triton, without a GPU: run by its interpreter, and compiled for one. See triton_child."""

import os
import subprocess
import sys

import pytest

import packtrain.engine.optim  # noqa: F401  its ops are tested as all others
from packtrain.engine.tensor import OPS

pytestmark = [pytest.mark.triton, pytest.mark.torch]
FUSED = sorted(name for name, op in OPS.items() if "cuda" in op.kernels)
LONG_TESTS = ["attention", "attention_back", "linear_cross_entropy"]
CALLING_TRITON = ["cast", "get_rows_back"]  # whose kernels of PyTorch call some in Triton


def run_child(mode: str, *names: str) -> list[str]:
    """What it says of each op."""
    env = {**os.environ, "TRITON_INTERPRET": str(int(mode == "values"))}
    command = [sys.executable, "-m", "tests.triton_child", mode, *names]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("names", [LONG_TESTS, [*FUSED, *CALLING_TRITON]], ids=["long", "others"])
def test_values_are_the_specification(names: list[str]) -> None:
    """Of many ops in one child: it takes seconds to begin."""
    op_names = [name for name in names if names is LONG_TESTS or name not in LONG_TESTS]
    assert run_child("values", *op_names) == [f"{name} as specified" for name in op_names]


def test_all_are_compiled_for_an_h100() -> None:
    said = run_child("compile", *FUSED, *CALLING_TRITON)
    counts = {line.split()[0]: int(line.split()[1]) for line in said}
    assert [*counts] == [*FUSED, *CALLING_TRITON] and sum(counts.values()) > 40
    assert counts["cast"] == 11 and counts["get_rows_back"] == counts["matmul"] == 1


def test_a_wrong_kernel_is_found() -> None:
    with pytest.raises(AssertionError, match="swiglu sample 0"):
        run_child("fault", "swiglu")
