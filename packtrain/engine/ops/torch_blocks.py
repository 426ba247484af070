"""Values of block types by PyTorch: the functions in dtypes/ that unpack a block, for all blocks at once.

Their words (`load`, `half_at`, …) get tensors here: a number of each block is (N, 1), sixteen lanes are (N, 16), and an
address is a place in the bytes of each block. So a type is described once, for all backends.
"""

import operator
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import NamedTuple

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.dtypes.intrinsics import Code, Word
from packtrain.engine.backends import triton
from packtrain.engine.ops.torch_kernels import CHUNK, spans, torch

FUSED = triton.late("unpack", "unpacked")
SMALLEST = 2.9387359e-39  # the reciprocal of smaller values is infinite


class At(NamedTuple):
    """An address: a place in the bytes (N, …) u8 of each block, or in the values (N, …) f32 of the result."""

    data: object
    place: int = 0

    def __add__(self, offset):
        return At(self.data, self.place + offset)


def unpack(y, w):
    """Write the values of blocks w to y, dense or not, bit for bit as kernels do."""
    raw = w.raw.reshape(-1, w.dtype.block_nbytes)
    values = (
        y.view(-1, w.dtype.block)
        if y.is_contiguous()
        else torch.empty((len(raw), w.dtype.block), dtype=torch.float32, device=raw.device)
    )
    code = w.dtype.code["unpack"]
    if not (triton.here(raw) and FUSED(values, raw, code)):
        run = words_of(code)
        for start, end in spans(len(raw), CHUNK // w.dtype.block, raw):
            run(At(values[start:end]), At(raw[start:end]), 1)
    if not y.is_contiguous():
        y.copy_(values.view(y.shape))


@cache
def words_of(code):
    """The function of a code with these words in place of those for compiled kernels."""
    function = code.function
    names = {name: meaning(name, value) for name, value in function.__globals__.items()}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)


def meaning(name, value):
    if value is intrinsics:
        return SimpleNamespace(**WORDS)
    if isinstance(value, Code):
        return lambda *args: words_of(value)(*args)
    if isinstance(value, Word):
        return WORDS.get(name, value)
    if isinstance(value, np.ndarray):
        return Table(value)
    return as_f32 if value is np.float32 else value


class Table:
    """An array of a type's room: constants, on the device where they are looked up."""

    def __init__(self, array):
        self.array, self.there = array, {}

    def on(self, device):
        if device not in self.there:
            kind = np.float32 if self.array.dtype.kind == "f" else np.int64
            self.there[device] = torch.tensor(self.array.astype(kind).tolist(), device=device)
        return self.there[device]

    def __getitem__(self, index):
        return self.on(index.device)[index.long()]

    def __rmul__(self, x):
        return x * self.on(x.device)


def as_f32(x):
    return x.float() if hasattr(x, "float") else np.float32(x).item()


def byte_at(at, i):
    place = at.place + i
    return at.data[:, place : place + 1].int()


def char_at(at, i):
    return byte_at(at, i).to(torch.int8).int()


def short_at(at, i):
    if isinstance(at, Room):
        return at.words[i // 2] >> i % 2 * 16 & 0xFFFF
    return byte_at(at, 2 * i) | (byte_at(at, 2 * i + 1) << 8)


def word_at(at, i):
    return short_at(at, 2 * i).long() | (short_at(at, 2 * i + 1).long() << 16)


def half_at(at, i):
    return short_at(at, i).to(torch.int16).view(torch.float16).float()


def bytes_at(at, i):
    if isinstance(at, Room):
        return torch.cat([word >> by & 255 for word in at.words for by in (0, 8, 16, 24)], -1)
    place = at.place + i
    return at.data[:, place : place + 16].int()


def chars_at(at, i):
    return bytes_at(at, i).to(torch.int8).int()


def store(to, i, values):
    place = to.place + i
    to.data[:, place : place + 16].copy_(values)


def load(at, i):
    return at if isinstance(at, Table) and i == 0 else at.data[:, at.place + i : at.place + i + 16]


def pick(table, index):
    return table[index & 15]


def to_floats(x):
    return x.float()


def to_bits(x):
    return Table(x.array.astype(np.int64)) if isinstance(x, Table) else x.int()


def spread_bits(word):
    return word


def splat(x):
    return x


def as_floats(word):
    return word.int().view(torch.float32)


def bytes_of(low, high):
    return torch.cat([word >> by & 255 for word in (low, high) for by in range(0, 64, 8)], -1)


def put_where(v, bits, other):
    """The other's lanes where the bit of the lane is set."""
    return torch.where(bits >> torch.arange(16, device=v.device) & 1 != 0, other, v)


class Lanes:
    """0 to 15, masked, then shifted: numbers to shift by, made on the device of what they shift."""

    def __init__(self, mask=15, by=0):
        self.mask, self.by = mask, by

    def __and__(self, mask):
        return Lanes(self.mask & mask, self.by)

    def __lshift__(self, by):
        return Lanes(self.mask, self.by + by)

    def __rrshift__(self, x):
        return x >> ((torch.arange(16, dtype=x.dtype, device=x.device) & self.mask) << self.by)


class Room:
    """Sixteen bytes of one's own for each block."""

    def __init__(self, count):
        self.words = [0] * count


def put_word(room, i, word):
    room.words[i] = word


def put_short(room, i, short):
    shift = i % 2 * 16
    room.words[i // 2] = room.words[i // 2] & ~(0xFFFF << shift) | (short & 0xFFFF) << shift


WORDS = {
    f.__name__: f
    for f in (
        as_floats, byte_at, bytes_at, bytes_of, char_at, chars_at, half_at, load, pick, put_short, put_where, put_word,
        short_at, splat, spread_bits, store, to_bits, to_floats, word_at,
    )
} | {"lane_numbers": Lanes, "neg": operator.neg, "scratch": Room}  # fmt: skip


def packed_q8_0(x):
    """f32 (..., C) as blocks of q8_0 (..., C / 32, 34) u8, bit for bit as `quantized_arrays.quantize` packs them."""
    blocks = x.view(*x.shape[:-1], -1, 32)
    unit = blocks.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(unit.abs() > SMALLEST, 1 / unit, 0.0)
    v = blocks * inverse
    size = v.abs()
    floored = size.floor()
    codes = (floored + ((size - floored) * 2).floor_()).copysign_(v).to(torch.int8)
    return torch.cat((unit.half().view(torch.uint8), codes.view(torch.uint8)), -1)
