"""Heavy loops as plain functions on arrays; they know no graph.

`packtrain.kernels.norm` and its siblings load on first use, under the policy in `runtime`:
importing this package loads neither numba nor torch.
"""

import importlib
from importlib.util import find_spec
from types import ModuleType

from packtrain.kernels import ahead, store
from packtrain.kernels.ahead import is_loaded, load_all, prepare
from packtrain.kernels.crew import COUNT, set_threads, threads

__all__ = [
    "AWARE", "CONVS", "COUNT", "DELTAS", "EXPERTS", "LEARNING", "OF_OPS", "PACKING", "SCANS", "TILED", "WEIGHING",
    "WINDOWS", "WRITING", "WRITTEN", "has_torch", "is_loaded", "load_all", "prepare", "set_threads", "threads", "torch",
]  # fmt: skip

# kernel modules for generation, for training, for experts, and for writing quantized files
WRITING = (
    "attention_cells", "choosing", "elementwise", "matmul", "norm", "packed", "rope", "rounded",
    "rows",
)  # fmt: skip
# plus those of the optimizer
LEARNING = (*WRITING, "attention", "attention_back", "cast", "loss", "packing", "reduce")
EXPERTS = ("experts", "softmax")
CONVS = ("short_conv",)
SCANS = ("short_conv", "scan")
DELTAS = ("delta",)  # of gated delta nets, beside those
TILED = ("head",)  # of the loss in bf16 with AMX
WRITTEN = ("softmax",)  # of attention that is written out
PACKING = ("quantize",)
WEIGHING = ("weighing", "snapping")  # of quantizing with an importance matrix, or onto grids
AWARE = ("recoding",)  # of training in the blocks of quantized matrices
WINDOWS = ("convolution", "windows")  # of convolutions and pools
OF_OPS = (*EXPERTS, *SCANS, *DELTAS, *AWARE, *WINDOWS, *TILED)  # of graphs of any ops, in training


def torch() -> ModuleType:
    """PyTorch, loaded on first use."""
    return importlib.import_module("torch")


def has_torch(peer: str) -> bool:
    """Whether there are PyTorch and, in a checkout, this module `benchmarks.…` that compares with it."""
    try:
        return find_spec("torch") is not None and find_spec(peer) is not None
    except ModuleNotFoundError:  # no checkout, or another module is called benchmarks
        return False


def __getattr__(name: str) -> object:
    if name.startswith("_") or name not in store.modules():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return ahead.load(name)
