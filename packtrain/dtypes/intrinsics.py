"""Placeholders for functions of compiled code: `from packtrain.dtypes.intrinsics import load`, or `intrinsics.half_at`.

Files in dtypes/ write kernel functions with names that `kernels.simd` and `quant.codes` define. Nothing here loads
numba: a Placeholder is an empty object until kernels are compiled, and then tells numba what it means.
"""

from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


class Placeholder:
    """A name that stands for a function in compiled code; `meaning` gives the function's type once kernels compile."""

    meaning: Callable[[], object]  # numba's type of the function, once kernels are compiled

    @property
    def _numba_type_(self) -> object:  # the attribute that numba reads
        return self.meaning()


class CompiledFunction(Placeholder):
    """A function in dtypes/, to be compiled; int is i64, np.float32 f32, I32x16 and F32x16 are vectors of 16.

    is_inlined   whether it is compiled into its callers; else it is compiled once, and called
    code_offset  for `codes`: what the function has added to each code, so that codes are bytes without sign
    max_code     for `codes`: largest magnitude of the codes before code_offset is added
    is_signed    whether the codes without code_offset are signed bytes
    """

    def __init__(
        self, function: Function, is_inlined: bool = False, code_offset: int = 0, max_code: int = 0
    ) -> None:
        self.function, self.is_inlined = function, is_inlined
        self.code_offset, self.max_code = code_offset, max_code
        self.is_signed = code_offset == 128


class I32x16:
    """The type of 16 i32 in one register."""


class F32x16:
    """The type of 16 f32 in one register."""


class U8x64:
    """The type of 64 bytes in one register."""


PLACEHOLDERS: dict[str, Placeholder] = {}  # placeholders by name


def part(function: Function) -> Any:
    """Mark a small function, which is compiled into its callers."""
    return CompiledFunction(function, is_inlined=True)


def compiled_function(function: Function) -> Any:
    """Mark a function that is compiled once."""
    return CompiledFunction(function)


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return PLACEHOLDERS.setdefault(name, Placeholder())
