"""Compiled loops over arrays, which know no graph.

A compiled module, such as rowwise/norm.py, is the attribute `norm` of this package and loads on first use, under the
policy in runtime/environment.py: importing this package loads neither numba nor torch.
"""

import importlib
from types import ModuleType

from packtrain.kernels.runtime import kernel_cache, loader
from packtrain.kernels.runtime.loader import is_loaded, load_all, prepare
from packtrain.kernels.runtime.thread_pool import MAX_THREADS, set_threads, threads

__all__ = [
    "AMX_LOSS_KERNELS", "CONV_KERNELS", "DELTA_KERNELS", "EXPERT_KERNELS", "GENERATION_KERNELS", "MAX_THREADS",
    "OP_KERNELS", "QUANTIZE_KERNELS", "REQUANTIZE_KERNELS", "SCAN_KERNELS", "SOFTMAX_KERNELS", "TRAINING_KERNELS",
    "WEIGHTED_QUANTIZE_KERNELS", "WINDOW_KERNELS", "is_loaded", "load_all", "prepare", "set_threads",
    "threads", "torch",
]  # fmt: skip

# kernel modules by the work that needs them
GENERATION_KERNELS = (
    "attention_cells", "choosing", "elementwise", "matmul_f32", "norm", "packed", "rope", "rounded", "rows",
)  # fmt: skip
# the optimizer's own modules come on top
TRAINING_KERNELS = (
    *GENERATION_KERNELS, "flash_attention", "attention_back", "cast", "loss", "packing", "reduce",
)  # fmt: skip
EXPERT_KERNELS = ("experts", "softmax")
CONV_KERNELS = ("short_conv",)
SCAN_KERNELS = ("short_conv", "scan")
DELTA_KERNELS = ("delta",)  # for gated delta nets, beside SCAN_KERNELS
AMX_LOSS_KERNELS = ("fused_head",)  # for the fused head in bf16 by AMX
SOFTMAX_KERNELS = ("softmax",)  # for attention as separate ops
QUANTIZE_KERNELS = ("quantize",)
# for quantizing with an importance matrix, or onto grids
WEIGHTED_QUANTIZE_KERNELS = ("weighted_quantize", "grid_quantize")
REQUANTIZE_KERNELS = ("requantize",)  # for training in the blocks of quantized matrices
WINDOW_KERNELS = ("convolution", "windows")  # for convolutions and pools
# for training graphs of any ops
OP_KERNELS = (
    *EXPERT_KERNELS, *SCAN_KERNELS, *DELTA_KERNELS, *REQUANTIZE_KERNELS, *WINDOW_KERNELS, *AMX_LOSS_KERNELS,
)  # fmt: skip


def torch() -> ModuleType:
    """Import PyTorch on first use and return the module."""
    return importlib.import_module("torch")


def __getattr__(name: str) -> object:
    if name.startswith("_") or name not in kernel_cache.kernel_modules():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return loader.load(name)
