"""Heavy loops as plain functions on arrays; they know no graph.

`packtrain.kernels.norm` and its siblings load when first named, under the policy in `runtime`:
importing this package loads neither numba nor torch.
"""

import importlib
from types import ModuleType

from packtrain.kernels import runtime
from packtrain.kernels.runtime import load_all, set_threads, threads

__all__ = ["load_all", "set_threads", "threads", "torch"]


def torch() -> ModuleType:
    """PyTorch, loaded when first asked for."""
    return importlib.import_module("torch")


def __getattr__(name: str) -> object:
    if name.startswith("_") or name not in runtime.modules():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return runtime.load(name)
