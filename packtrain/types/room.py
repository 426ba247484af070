"""What one element type is: its sizes, its numbers in files, and how its blocks are read and written.

A type packs `block` consecutive elements of a row into `block_nbytes` bytes; scalars have block 1. In NumPy a block is
a record of one field named after its type, so an array of blocks knows what it holds. Sizes and numbers are ggml's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packtrain.types.words import Code

Bytes = np.ndarray  # u8 (rows, blocks, bytes of a block)
KNOWN: dict[str, "Dtype"] = {}  # all types by name


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a block keeps its codes and scales, in bytes: value = code * step + low, for merging with data.

    group   values that share a step and a low
    levels  of codes; above 64 a code is a byte with a sign
    low     what code 0 stands for, in steps; None where the block has offsets of its own
    halves  places of its f16: what steps count in, and what lows count in
    quads   place of the low four bits of each code, in so many runs: of a run, the low half-bytes come first
    high    place of the bits above, in so many runs: of a run, the lowest bits of its bytes come first
    scales  the whole numbers that halves are multiplied by, (rows, blocks, groups) f32 for each; None: one
    """

    group: int
    levels: int
    low: int | None
    halves: tuple[int, ...]
    quads: int
    runs: int = 1
    high: int = 0
    high_runs: int = 1
    scales: Callable[[Bytes], tuple[np.ndarray, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Mix:
    """A mix under llama-quantize's name: its number in files (llama.h, enum llama_ftype), the type of most tensors.

    first   what the first tensors of two kinds get instead
    spread  what they get in the first and last eighth of the blocks, and every third between
    """

    name: str
    number: int
    dtype: "Dtype"
    first: "Dtype | None" = None
    spread: "Dtype | None" = None


@dataclass(frozen=True, slots=True, eq=False)
class Dtype:
    """One element type. There is one of each, also for what was pickled: they compare by identity.

    number   in files: ggml.h, enum ggml_type; None if files have none of it
    smaller  what llama-quantize takes where rows are no whole blocks of it
    richer   what it takes for matrices that serve much more than others
    instead  what is written for it where it can only be read: the next larger one of the same block
    mixes    what files of it are called, the usual one last
    code     its kernels: unpack, dot and pack
    """

    name: str
    number: int | None
    block: int
    block_nbytes: int
    numpy: np.dtype
    smaller: "Dtype | None" = None
    richer: "Dtype | None" = None
    instead: "Dtype | None" = None
    layout: Layout | None = None
    mixes: list[Mix] = field(default_factory=list)
    code: dict[str, Code] = field(default_factory=dict)

    def __post_init__(self) -> None:
        KNOWN[self.name] = self

    def __repr__(self) -> str:
        return self.name

    def mix(self, name: str, number: int, **instead: "Dtype") -> None:
        self.mixes.append(Mix(name, number, self, **instead))

    def unpack(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """(y, x, n): n blocks at x become f32 at y; of scalars n is any number. Addresses all."""
        self.code["unpack"] = Code(function)
        return function

    def dot(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """(x, w, n): the product of n f32 at x with as many packed ones at w; n is a multiple of 32 and of a block."""
        self.code["dot"] = Code(function)
        return function

    def pack(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """(y, x, n): f32 at x become n blocks at y; values are finite. A scale too small for f16 makes zeros."""
        self.code["pack"] = Code(function)
        return function

    def row_nbytes(self, width: int) -> int:
        """Bytes of a row of `width` elements; `width` must be whole blocks."""
        return width // self.block * self.block_nbytes

    def array_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the NumPy array that holds a tensor of `shape`: its last axis counts blocks."""
        return (*shape[:-1], shape[-1] // self.block) if shape else ()

    def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The inverse of array_shape."""
        return (*shape[:-1], shape[-1] * self.block) if shape else ()

    @property
    def quantized(self) -> bool:
        return self.block > 1

    @property
    def file_type(self) -> int:
        """The number of a file whose matrices are of this type."""
        return self.mixes[-1].number

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return named, (self.name,)


def named(name: str) -> Dtype:
    """The type of this name. Raises KeyError."""
    return KNOWN[name]


def scalar(name: str, number: int | None, numpy: str) -> Dtype:
    """A type that NumPy has."""
    return Dtype(name, number, 1, np.dtype(numpy).itemsize, np.dtype(numpy))


def packed(name: str, number: int, block: int, nbytes: int, **more: Any) -> Dtype:
    """A type of blocks."""
    return Dtype(name, number, block, nbytes, np.dtype([(name, f"V{nbytes}")]), **more)
