"""Placeholders for functions of compiled code: `from packtrain.dtypes.intrinsics import load`, or `intrinsics.half_at`.

Files in dtypes/ write kernel functions with names that `kernels.simd`, `bits` and `codes` define. Nothing here loads
numba: a Word is an empty object until kernels are compiled, and then tells numba what it means.
"""

from collections.abc import Callable
from typing import Any


class Word:
    """A function that compiled code calls by its name."""

    meaning: Callable[[], object]  # its type to numba, once kernels are compiled

    @property
    def _numba_type_(self) -> object:  # what numba asks a value for
        return self.meaning()


class Code(Word):
    """A function in dtypes/, to be compiled; int is i64, np.float32 f32, Ints and Floats are vectors of 16.

    inlined  into its callers; else it is compiled once, and called
    less     what is too much in codes that it gives
    most     how large they can be without that, whatever their sign
    signed   whether codes are signed bytes without that
    """

    def __init__(
        self, function: Callable[..., Any], inlined: bool = False, less: int = 0, most: int = 0
    ) -> None:
        self.function, self.inlined, self.less, self.most = function, inlined, less, most
        self.signed = less == 128


class Ints:
    """The type of 16 i32 in one register."""


class Floats:
    """The type of 16 f32 in one register."""


class Codes:
    """The type of 64 bytes in one register."""


ASKED: dict[str, Word] = {}  # placeholders by name


def part(function: Callable[..., Any]) -> Any:
    """Mark a small function, which is inlined into its callers."""
    return Code(function, inlined=True)


def code(function: Callable[..., Any]) -> Any:
    """Mark a function that is compiled once."""
    return Code(function)


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return ASKED.setdefault(name, Word())
