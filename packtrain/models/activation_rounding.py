"""Products with weights, exact or with activations rounded to 8 bits, as the config's `activations` says."""

from packtrain.dtypes import ROUNDABLE
from packtrain.engine import ops
from packtrain.engine.ops.rounded import MAX_DOT_ROWS, has_fast_integer_products
from packtrain.engine.tensor import Tensor
from packtrain.models.config import Config

F32, Q8 = "f32", "q8"
ACTIVATIONS_HELP = (
    "q8: round them to 8 bits, 32 at a time, for products with quantized weights, as llama.cpp does"
)
AUTO_HELP = "auto: q8 for quantized models on the CPU with --precision f32, else f32, exact"
PRECISION_HELP = (
    "of products with many tokens, as of a prompt: bf16 rounds their factors, and is about twice as fast, on CPUs with"
    " AVX512_BF16; bf16x3 takes them as sums of two bf16: nearly f32 and faster, with AMX"
)


def rounded(config: Config, x: Tensor, w: Tensor) -> Tensor:
    """Round x to 8 bits if the config and w's element type ask for it; else return x."""
    return ops.rounded(x) if config.activations == Q8 and w.dtype in ROUNDABLE else x


def matmul_weight(config: Config, x: Tensor, w: Tensor, acc: Tensor | None = None) -> Tensor:
    """Compute x @ w.T (+ acc), with x rounded to 8 bits where the config asks for it."""
    if config.activations == Q8 and w.dtype in ROUNDABLE:
        is_small = x.spec.size <= MAX_DOT_ROWS * x.shape[-1]
        # many rows are rounded and multiplied in f32 unless integer products are faster; has_fast_integer_products
        # stands last because it loads LLVM, which takes megabytes
        if is_small or (config.precision == F32 and has_fast_integer_products()):
            return ops.matmul_rounded(x, w, acc)
    return ops.matmul(rounded(config, x, w), w, acc, precision=config.precision)
