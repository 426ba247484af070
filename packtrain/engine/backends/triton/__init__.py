"""Kernels in Triton for `cuda`: each does in one pass over memory what takes PyTorch several.

They take dense tensors of PyTorch and write into results passed to them. Ops declare them as kernels `cuda`; without
one, an op uses PyTorch's. Triton is loaded when a kernel first runs: PyTorch for CUDA brings it along.
TRITON_INTERPRET=1 runs kernels on tensors of the CPU, which is how they are tested without a GPU. PyTorch alone needed
4,349 launches for a step of `15m`, and its attention took 60 times as long where documents share a row, because
PyTorch's own kernels do not know packed documents."""

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
    """Whether kernels in Triton run where tensor x is."""
    is_interpreted = x.is_cpu and os.environ.get("TRITON_INTERPRET") == "1"
    return bool(x.is_cuda or is_interpreted) and is_installed()


def lazy_kernel(module: str, name: str) -> Callable[..., Any]:
    """Return a function that calls kernel `name` of a module here, which is imported at the first call."""

    def run_kernel(*args: Any, **attrs: Any) -> Any:
        return getattr(import_module(f"{__name__}.{module}"), name)(*args, **attrs)

    return run_kernel


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run a Triton kernel on its first argument's device; on `meta` tensors nothing, to measure only temporaries."""
    if not args[0].is_meta and all(grid):
        with import_module("torch").cuda.device_of(args[0]):
            kernel[grid](*args, **constants)


def power_of_two(n: int) -> int:
    """Return the least power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def blocks(n: int, block_size: int) -> int:
    return -(-n // block_size)
