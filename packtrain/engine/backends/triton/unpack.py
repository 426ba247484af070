"""Values of block types: the functions in dtypes/ that unpack a block, compiled by Triton for many blocks at once.

The words of these functions (`load`, `half_at`, …) mean what they mean to `ops.torch_blocks`: a number of each block
is (N, 1), sixteen lanes are (N, 16), and an address is a pointer into each block. Types that look values up in tables
are left to PyTorch. No multiply-add is fused, so that bits equal the CPU's."""

from functools import cache
from types import FunctionType, ModuleType

import numpy as np
import triton
import triton.language as tl

from packtrain.engine.backends.triton import blocks, launch

SIZE = 32  # blocks that a program unpacks


@triton.jit
def lane_numbers():
    return tl.arange(0, 16)[None, :]


@triton.jit
def byte_at(at, i):
    return tl.load(at + i).to(tl.int32)


@triton.jit
def char_at(at, i):
    return byte_at(at, i).to(tl.int8).to(tl.int32)


@triton.jit
def short_at(at, i):
    return byte_at(at, 2 * i) | (byte_at(at, 2 * i + 1) << 8)


@triton.jit
def word_at(at, i):
    return short_at(at, 2 * i).to(tl.int64) | (short_at(at, 2 * i + 1).to(tl.int64) << 16)


@triton.jit
def half_at(at, i):
    return short_at(at, i).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def bytes_at(at, i):
    return tl.load(at + i + lane_numbers()).to(tl.int32)


@triton.jit
def chars_at(at, i):
    return bytes_at(at, i).to(tl.int8).to(tl.int32)


@triton.jit
def store(address, i, values):
    tl.store(address + i + lane_numbers(), values)


@triton.jit
def to_floats(x):
    return x.to(tl.float32)


@triton.jit
def spread_bits(word):
    return word


WORDS = {
    f.__name__: f
    for f in (
        byte_at, bytes_at, char_at, chars_at, half_at, lane_numbers, short_at, spread_bits, store, to_floats, word_at,
    )
}  # fmt: skip


@triton.jit
def _unpack(
    y, x, count, UNPACK: tl.constexpr, BYTES: tl.constexpr, VALUES: tl.constexpr, SIZE: tl.constexpr
):
    """Dequantize SIZE of `count` blocks of BYTES bytes at x to VALUES f32 each at y by a type's function UNPACK."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    block = tl.minimum(at, count - 1)[:, None]  # the last block several times, with equal values
    UNPACK(y + block * VALUES, x + block * BYTES)


def unpack_blocks(y, x, code):
    """Dequantize blocks x (N, bytes of a block) u8 into y (N, values of a block) f32, both dense, with the CPU's bits;
    return False if the function of `code`, a type's unpacking, needs what Triton lacks here."""
    function = _triton_function(code)
    if function is not None:
        options = {"UNPACK": function, "BYTES": x.shape[1], "VALUES": y.shape[1], "SIZE": SIZE}
        launch(_unpack, (blocks(len(x), SIZE),), y, x, len(x), **options, enable_fp_fusion=False)
    return function is not None


@cache
def _triton_function(code):
    """Compile the unpacking function of `code` with Triton, with WORDS for the CPU's words; None if WORDS lacks one."""
    source_function, bindings, words = code.function, dict[str, object](), ()
    for name in source_function.__code__.co_names:
        value = source_function.__globals__.get(name)
        if isinstance(value, ModuleType):  # a module of words
            bindings[name] = module = ModuleType(value.__name__)
            vars(module).update(WORDS)
            words = vars(value)["PLACEHOLDERS"]
        elif value is np.float32:
            bindings[name] = to_floats
        elif hasattr(value, "function"):
            bindings[name] = _triton_function(value)
        elif isinstance(value, int):
            bindings[name] = tl.constexpr(value)
        elif name in source_function.__globals__ or name in words:
            bindings[name] = WORDS.get(name)
    if None in bindings.values():
        return None
    bindings |= {"__name__": source_function.__module__, "__builtins__": __builtins__, "tl": tl}
    triton_function = FunctionType(source_function.__code__, bindings, source_function.__name__)
    triton_function.__qualname__ = source_function.__qualname__
    return triton.jit(triton_function)
