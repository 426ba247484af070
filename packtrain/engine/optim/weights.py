"""Functions that optimizer steps share: weights of several types, stochastic rounding, and samples."""

from typing import Any

import numpy as np

from packtrain.common.options import OPTIMIZER
from packtrain.dtypes import TRAINABLE, bf16, dtype_of, f32, i64
from packtrain.engine.ops.arrays import flatten, noise_stream
from packtrain.engine.ops.torch_kernels import CHUNK, chunk_bounds, key_of, torch, uniform
from packtrain.engine.tensor import Spec, Tensor, constant, require, weight
from packtrain.kernels.rowwise.counter_rng import stream_key as mixed
from packtrain.kernels.rowwise.counter_rng import uniform_numpy


def require_weight(w: Tensor, key: Tensor | None, *tensors: Tensor) -> None:
    """Raise RequirementError unless w is f32, or bf16 with a rounding key, and the `tensors` are f32 of its shape."""
    specs, dtype, shape = [t.spec for t in tensors], w.spec.dtype, w.spec.shape
    is_trainable = dtype in TRAINABLE and specs.count(Spec(shape)) == len(specs)
    texts = f"{', '.join(['{}'] * len(specs))}; these must be f32{[*shape]}, and w f32 or bf16"
    require(is_trainable, f"w is {{}} with {texts}", w, *tensors)
    fits = key is None if dtype == f32 else key is not None and key.spec == Spec((2,), i64)
    require(fits, "w is {}, key {}; a key, i64[2], is only for bf16", w, key)


def write(w, values, key, stream):
    """Write values to a weight; to bf16 with stochastic rounding by `stream` of a random key (None for f32), so that
    the mean over many draws is the value. 16 random bits are added to the 16 that are dropped, and the carry is kept.
    """
    if key is None:
        w[...] = values
        return
    float_bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    uniform = uniform_numpy(int(key[0]), int(key[1]), stream, w.size).reshape(w.shape)
    float_bits = float_bits + (uniform * 65536).astype(np.uint32)
    w[...] = (float_bits >> 16).astype(np.uint16).view(w.dtype)


def parts_of(w, *tensors):
    """Yield (start, [part of flat w, part of each flat tensor]), views, so that an update needs room for one part."""
    flat_tensors = [t.view(-1) for t in (w, *tensors)]
    for chunk_start, chunk_end in chunk_bounds(len(flat_tensors[0]), CHUNK, w):
        yield chunk_start, [t[chunk_start:chunk_end] for t in flat_tensors]


def write_torch(w, values, key, stream, chunk_start, is_finite):
    """Write values, if `is_finite`, to w, part of a weight from element `chunk_start` on; key, stream as in `write`."""
    if key is not None:
        bits = uniform(key_of(key, stream), chunk_start, chunk_start + len(w)).mul_(65536).int()
        bits = (bits.add_(values.float().view(torch.int32)) >> 16).to(torch.int16)
        values = bits.view(torch.bfloat16)
    torch.where(is_finite, values, w, out=w)


def stored(w, key, stream):
    """Return a weight as kernels take it: ggml's number of its type, its bytes, the key of its stochastic rounding."""
    dtype_number = dtype_of(w).number
    rounding_key = 0 if key is None else mixed(int(key[0]), int(key[1]), stream)
    return dtype_number, flatten(w).view(np.uint8), rounding_key


def sampled():
    """Yield (w, key, gate, decay) for samples of update ops: weights of each type, and whether they decay."""
    cases = (1, 1.0, True), (17, 0.5, False), (64, np.nan, True), (70_000, 1.0, True)
    for n, gate, decay in cases:
        gate = constant("gate", np.array(gate))
        yield weight("w", (n,)), None, gate, decay
        yield weight("w", (n,), bf16), constant("key", np.array([3, n]), i64), gate, decay


def stream_of(w: Tensor) -> int:
    """Return the number of the random stream for stochastic rounding of w; 0 for f32, which is not rounded."""
    return 0 if w.spec.dtype == f32 else noise_stream(w.label)


def decay_axes() -> Any:
    """Return the option `decay_axes`: weight decay applies to tensors with at least so many axes."""
    return OPTIMIZER(
        2, "weight decay of tensors with at least N axes only", min_value=0, max_value=4, requires="weight_decay",
    )  # fmt: skip
