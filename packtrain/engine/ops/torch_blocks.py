"""Values of block types by PyTorch: the functions in dtypes/ that unpack a block, for all blocks at once.

The words of these functions (`load`, `half_at`, …) take tensors here: a number of each block is (N, 1), sixteen lanes
are (N, 16), and an address is a place in the bytes of each block. So a type is described once, for all backends.
"""

import operator
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import NamedTuple

import numpy as np

from packtrain.dtypes import intrinsics
from packtrain.engine.backends import triton
from packtrain.engine.ops.torch_kernels import CHUNK, chunk_bounds, torch

TRITON_UNPACK = triton.lazy_kernel("unpack", "unpack_blocks")
MIN_INVERTIBLE = 2.9387359e-39  # the reciprocal of smaller values is infinite


class BlockAddress(NamedTuple):
    """An address in the code that unpacks a block: a place in the bytes (N, …) of all blocks, or in their values."""

    data: object
    offset: int = 0

    def __add__(self, offset):
        return BlockAddress(self.data, self.offset + offset)


def unpack(y, w):
    """Write the values of quantized blocks w to y, f32, dense or not, with the bits of the compiled kernels."""
    raw = w.raw.reshape(-1, w.dtype.block_nbytes)
    shape = len(raw), w.dtype.block
    is_dense = y.is_contiguous()
    values = (
        y.view(shape) if is_dense else torch.empty(shape, dtype=torch.float32, device=raw.device)
    )
    code = w.dtype.code["unpack"]
    if not (triton.runs_on(raw) and TRITON_UNPACK(values, raw, code)):
        run = torch_function(code)
        for chunk_start, end in chunk_bounds(len(raw), CHUNK // w.dtype.block, raw):
            run(BlockAddress(values[chunk_start:end]), BlockAddress(raw[chunk_start:end]))
    if not is_dense:
        y.copy_(values.view(y.shape))


@cache
def torch_function(code):
    """Return the unpacking function of `code` for tensors: with WORDS in place of words of compiled kernels."""
    function = code.function
    names = {name: torch_meaning(name, value) for name, value in function.__globals__.items()}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)


def torch_meaning(name, value):
    """Return what a global name of an unpacking function stands for in PyTorch."""
    if value is intrinsics:
        return SimpleNamespace(**WORDS)
    if isinstance(value, intrinsics.CompiledFunction):
        return lambda *args: torch_function(value)(*args)
    if isinstance(value, intrinsics.Placeholder):
        return WORDS.get(name, value)
    if isinstance(value, np.ndarray):
        return DeviceTable(value)
    return as_f32 if value is np.float32 else value


class DeviceTable:
    """A type's table of constants, as a tensor on each device where values are looked up."""

    def __init__(self, array):
        self.array, self.device_tensors = array, {}

    def on_device(self, device):
        """Return the table as a tensor on a device, copied there once."""
        if device not in self.device_tensors:
            number_type = np.float32 if self.array.dtype.kind == "f" else np.int64
            numbers = self.array.astype(number_type).tolist()
            self.device_tensors[device] = torch.tensor(numbers, device=device)
        return self.device_tensors[device]

    def __getitem__(self, index):
        return self.on_device(index.device)[index.long()]

    def __rmul__(self, x):
        return x * self.on_device(x.device)


def as_f32(x):
    return x.float() if hasattr(x, "float") else np.float32(x).item()


def byte_at(at, i):
    offset = at.offset + i
    return at.data[:, offset : offset + 1].int()


def short_at(at, i):
    if isinstance(at, ScratchWords):
        return at.words[i // 2] >> i % 2 * 16 & 0xFFFF
    return byte_at(at, 2 * i) | (byte_at(at, 2 * i + 1) << 8)


def bytes_at(at, i):
    if isinstance(at, ScratchWords):
        return torch.cat([word >> shift & 255 for word in at.words for shift in (0, 8, 16, 24)], -1)
    offset = at.offset + i
    return at.data[:, offset : offset + 16].int()


def store(address, i, values):
    offset = address.offset + i
    address.data[:, offset : offset + 16].copy_(values)


def load(at, i):
    if isinstance(at, DeviceTable) and i == 0:
        return at
    return at.data[:, at.offset + i : at.offset + i + 16]


def to_bits(x):
    return DeviceTable(x.array.astype(np.int64)) if isinstance(x, DeviceTable) else x.int()


def bytes_of(low, high):
    return torch.cat([word >> shift & 255 for word in (low, high) for shift in range(0, 64, 8)], -1)


def put_where(v, bits, other_lanes):
    """Return sixteen lanes: of `other_lanes` where the lane's bit is set in `bits`, else of v."""
    return torch.where(bits >> torch.arange(16, device=v.device) & 1 != 0, other_lanes, v)


class LaneNumbers:
    """Lane numbers 0 to 15, masked, then shifted: distances to shift by, made on the device of the shifted value."""

    def __init__(self, mask=15, shift=0):
        self.mask, self.shift = mask, shift

    def __and__(self, mask):
        return LaneNumbers(self.mask & mask, self.shift)

    def __lshift__(self, shift):
        return LaneNumbers(self.mask, self.shift + shift)

    def __rrshift__(self, x):
        return x >> ((torch.arange(16, dtype=x.dtype, device=x.device) & self.mask) << self.shift)


class ScratchWords:
    """Sixteen bytes of scratch memory for each block, as words that may be tensors."""

    def __init__(self, num_words):
        self.words = [0] * num_words


def put_word(room, i, word):
    room.words[i] = word


def put_short(room, i, short):
    shift = i % 2 * 16
    room.words[i // 2] = room.words[i // 2] & ~(0xFFFF << shift) | (short & 0xFFFF) << shift


WORDS = {
    "as_floats": lambda word: word.int().view(torch.float32), "byte_at": byte_at, "bytes_at": bytes_at,
    "bytes_of": bytes_of, "char_at": lambda at, i: byte_at(at, i).to(torch.int8).int(),
    "chars_at": lambda at, i: bytes_at(at, i).to(torch.int8).int(),
    "half_at": lambda at, i: short_at(at, i).to(torch.int16).view(torch.float16).float(), "lane_numbers": LaneNumbers,
    "load": load, "neg": operator.neg, "pick": lambda table, index: table[index & 15], "put_short": put_short,
    "put_where": put_where, "put_word": put_word, "scratch": ScratchWords, "short_at": short_at, "splat": lambda x: x,
    "spread_bits": lambda word: word, "store": store, "to_bits": to_bits, "to_floats": lambda x: x.float(),
    "word_at": lambda at, i: short_at(at, 2 * i).long() | (short_at(at, 2 * i + 1).long() << 16),
}  # fmt: skip


def packed_q8_0(x):
    """Pack f32 (..., C) as blocks of q8_0 (..., C / 32, 34) u8, bit for bit as `quantized_arrays.quantize` does."""
    blocks = x.view(*x.shape[:-1], -1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scale.abs() > MIN_INVERTIBLE, 1 / scale, 0.0)
    v = blocks * inverse
    magnitude = v.abs()
    floored = magnitude.floor()
    codes = (floored + ((magnitude - floored) * 2).floor_()).copysign_(v).to(torch.int8)
    return torch.cat((scale.half().view(torch.uint8), codes.view(torch.uint8)), -1)
