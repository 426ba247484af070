"""Placeholders for functions of compiled code: `from packtrain.dtypes.intrinsics import load`, or `intrinsics.half_at`.

Files in dtypes/ write kernel functions with names that `kernels.simd`, `bits` and `codes` define. Nothing here loads
numba: a Word is an empty object until kernels are compiled, and then tells numba what it means.
"""

from collections.abc import Callable
from typing import Any


class Placeholder:
    """A function that compiled code calls by its name."""

    meaning: Callable[[], object]  # its type to numba, once kernels are compiled

    @property
    def _numba_type_(self) -> object:  # what numba asks a value for
        return self.meaning()


class CompiledFunction(Placeholder):
    """A function in dtypes/, to be compiled; int is i64, np.float32 f32, Ints and Floats are vectors of 16.

    is_inlined   into its callers; else it is compiled once, and called
    code_offset  what is too much in codes that it gives
    max_code     how large they can be without that, whatever their sign
    is_signed    whether codes are signed bytes without that
    """

    def __init__(
        self,
        function: Callable[..., Any],
        is_inlined: bool = False,
        code_offset: int = 0,
        max_code: int = 0,
    ) -> None:
        self.function, self.is_inlined, self.code_offset, self.max_code = (
            function,
            is_inlined,
            code_offset,
            max_code,
        )
        self.is_signed = code_offset == 128


class I32x16:
    """The type of 16 i32 in one register."""


class F32x16:
    """The type of 16 f32 in one register."""


class U8x64:
    """The type of 64 bytes in one register."""


PLACEHOLDERS: dict[str, Placeholder] = {}  # placeholders by name


def part(function: Callable[..., Any]) -> Any:
    """Mark a small function, which is inlined into its callers."""
    return CompiledFunction(function, is_inlined=True)


def compiled_function(function: Callable[..., Any]) -> Any:
    """Mark a function that is compiled once."""
    return CompiledFunction(function)


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return PLACEHOLDERS.setdefault(name, Placeholder())
