"""Heavy loops as plain functions on arrays; they know no graph.

`packtrain.kernels.norm` and its siblings load on first use, under the policy in `runtime`:
importing this package loads neither numba nor torch.
"""

import importlib
from importlib.util import find_spec
from types import ModuleType

from packtrain.kernels import ahead, store
from packtrain.kernels.ahead import is_loaded, load_all, prepare
from packtrain.kernels.crew import MAX_THREADS, set_threads, threads

__all__ = [
    "AMX_LOSS_KERNELS",
    "CONV_KERNELS",
    "DELTA_KERNELS",
    "EXPERT_KERNELS",
    "GENERATION_KERNELS",
    "MAX_THREADS",
    "OP_KERNELS",
    "QUANTIZE_KERNELS",
    "REQUANTIZE_KERNELS",
    "SCAN_KERNELS",
    "SOFTMAX_KERNELS",
    "TRAINING_KERNELS",
    "WEIGHTED_QUANTIZE_KERNELS",
    "WINDOW_KERNELS",
    "has_torch",
    "is_loaded",
    "load_all",
    "prepare",
    "set_threads",
    "threads",
    "torch",
]  # fmt: skip

# kernel modules for generation, for training, for experts, and for writing quantized files
GENERATION_KERNELS = (
    "attention_cells", "choosing", "elementwise", "matmul", "norm", "packed", "rope", "rounded",
    "rows",
)  # fmt: skip
# plus those of the optimizer
TRAINING_KERNELS = (
    *GENERATION_KERNELS,
    "attention",
    "attention_back",
    "cast",
    "loss",
    "packing",
    "reduce",
)
EXPERT_KERNELS = ("experts", "softmax")
CONV_KERNELS = ("short_conv",)
SCAN_KERNELS = ("short_conv", "scan")
DELTA_KERNELS = ("delta",)  # of gated delta nets, beside those
AMX_LOSS_KERNELS = ("head",)  # of the loss in bf16 with AMX
SOFTMAX_KERNELS = ("softmax",)  # of attention that is written out
QUANTIZE_KERNELS = ("quantize",)
WEIGHTED_QUANTIZE_KERNELS = (
    "weighing",
    "snapping",
)  # of quantizing with an importance matrix, or onto grids
REQUANTIZE_KERNELS = ("recoding",)  # of training in the blocks of quantized matrices
WINDOW_KERNELS = ("convolution", "windows")  # of convolutions and pools
OP_KERNELS = (
    *EXPERT_KERNELS,
    *SCAN_KERNELS,
    *DELTA_KERNELS,
    *REQUANTIZE_KERNELS,
    *WINDOW_KERNELS,
    *AMX_LOSS_KERNELS,
)  # of graphs of any ops, in training


def torch() -> ModuleType:
    """PyTorch, loaded on first use."""
    return importlib.import_module("torch")


def has_torch(peer_module: str) -> bool:
    """Whether there are PyTorch and, in a checkout, this module `benchmarks.…` that compares with it."""
    try:
        return find_spec("torch") is not None and find_spec(peer_module) is not None
    except ModuleNotFoundError:  # no checkout, or another module is called benchmarks
        return False


def __getattr__(name: str) -> object:
    if name.startswith("_") or name not in store.kernel_modules():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return ahead.load(name)
