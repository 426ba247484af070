"""Products with weights, exact or with activations rounded to 8 bits, as a run asks for."""

from packtrain.dtypes import ROUNDABLE
from packtrain.engine import ops
from packtrain.engine.ops.rounded import MAX_DOT_ROWS, has_fast_integer_products
from packtrain.engine.tensor import Tensor
from packtrain.models.config import Config

F32, Q8 = "f32", "q8"
ACTIVATIONS_HELP = (
    "q8: round them to 8 bits, 32 at a time, for products with quantized weights, as llama.cpp does"
)


PRECISION_HELP = (
    "of products with many tokens, as of a prompt: bf16 rounds their factors, and is about twice as fast, on CPUs with"
    " AVX512_BF16; bf16x3 takes them as sums of two bf16: nearly f32 and faster, with AMX"
)


def rounded(config: Config, x: Tensor, w: Tensor) -> Tensor:
    """x as a product with w has it."""
    return ops.rounded(x) if config.activations == Q8 and w.dtype in ROUNDABLE else x


def matmul_weight(config: Config, x: Tensor, w: Tensor, acc: Tensor | None = None) -> Tensor:
    """x @ w.T (+ acc)."""
    if config.activations == Q8 and w.dtype in ROUNDABLE:
        is_small = x.spec.size <= MAX_DOT_ROWS * x.shape[-1]
        # where products in integers are not faster, more are rounded and multiplied in f32; this is asked
        # last: what the CPU has is LLVM's to say, which takes megabytes to load
        if is_small or (config.precision == F32 and has_fast_integer_products()):
            return ops.matmul_rounded(x, w, acc)
    return ops.matmul(rounded(config, x, w), w, acc, precision=config.precision)
