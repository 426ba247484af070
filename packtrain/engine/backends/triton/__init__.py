"""Kernels in Triton for `cuda`: what takes PyTorch several passes over memory, in one.

They get PyTorch's tensors, dense, and write their results into those given. Ops declare them as kernels `cuda`; what
an op has none for is PyTorch's. Triton is loaded when the first of them runs: PyTorch for CUDA brings it along.
TRITON_INTERPRET=1 runs them on tensors of the CPU, which is how they are tested without a GPU.
"""

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@cache
def is_installed() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def runs_on(x: Any) -> bool:
    """Whether its kernels run where a tensor is."""
    return (
        bool(x.is_cuda or (x.is_cpu and os.environ.get("TRITON_INTERPRET") == "1"))
        and is_installed()
    )


def lazy_kernel(module: str, name: str) -> Callable[..., Any]:
    """A kernel of a module of this package, which is imported at its first call."""

    def run_kernel(*args: Any, **attrs: Any) -> Any:
        return getattr(import_module(f"{__name__}.{module}"), name)(*args, **attrs)

    return run_kernel


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run a kernel of Triton on the device of its first argument; tensors without values (`meta`) only show what a
    function makes beside it."""
    if not args[0].is_meta and all(grid):
        with import_module("torch").cuda.device_of(args[0]):
            kernel[grid](*args, **constants)


def power_of_two(n: int) -> int:
    """The least that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def blocks(n: int, block_size: int) -> int:
    return -(-n // block_size)
