"""Define element types: their sizes, their numbers in files, and how their blocks are read and written.

A type packs `block` consecutive elements of a row into `block_nbytes` bytes; scalars have block 1. In NumPy a block is
a record of one field named after its type, so an array of blocks knows its type. Sizes and numbers are ggml's.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packtrain.dtypes.intrinsics import CompiledFunction
from packtrain.dtypes.iq_points import GridPoints

Bytes = np.ndarray  # u8 (rows, blocks, bytes of a block)
DTYPES_BY_NAME: dict[str, "Dtype"] = {}  # all types by name


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """Byte offsets of a block's codes and scales: value = code * step + low, for calibrated merging.

    group_size       values that share a step and a low
    num_codes        number of codes; above 64 a code is a signed byte
    low              value of code 0, in steps; None if the block has its own offsets
    half_offsets     byte offsets of its f16 values: the unit of steps and, if there are two, that of lows
    quads, runs      byte offset of codes' low bits, number of runs: of a run, the lowest bits of its bytes come first
    num_low_bits     number of low bits: four or two
    high, high_runs  byte offset of the bits above, and number of runs, likewise
    scales           (raw) -> integers that the f16 values are multiplied by, (rows, blocks, groups) f32 each; None: 1
    table            the values that codes stand for in the equation, rising, f32; None: the codes themselves
    """

    group_size: int
    num_codes: int
    low: int | None
    half_offsets: tuple[int, ...]
    quads: int
    runs: int = 1
    num_low_bits: int = 4
    high: int = 0
    high_runs: int = 1
    scales: Callable[[Bytes], tuple[np.ndarray, ...]] | None = None
    table: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class QuantMix:
    """A mix by llama-quantize's name: its number in files (llama.h, enum llama_ftype), the type of most tensors.

    attn_v, attn_v_grouped   type of attn_v; where four or more heads share it
    ffn_down, attn_output, token_embd   types of these tensors
    first_layers             type of the first attn_v and ffn_down
    has_few_first            whether the first are two attn_v, and the ffn_down of a sixteenth of the blocks
    outer_layers             their type in the first and last eighth of the blocks, and every third between
    first_ffn_down_weighted, first_ffn_down_unweighted   type of the first ffn_down with, without importance matrix
    attn_qk, output_head     type of attn_q and attn_k; of output.weight instead of q6_K
    ffn_gate_up_middle       type of ffn_gate and ffn_up but in the first and last eighth of the blocks
    ffn_down_8_experts       type of the ffn_down that `outer_layers` would be for, in models of eight experts
    is_smallest              whether the rules are those of the smallest types
    """

    name: str
    file_type: int
    dtype: "Dtype"
    attn_v: "Dtype | None" = None
    attn_v_grouped: "Dtype | None" = None
    ffn_down: "Dtype | None" = None
    attn_output: "Dtype | None" = None
    token_embd: "Dtype | None" = None
    first_layers: "Dtype | None" = None
    has_few_first: bool = False
    outer_layers: "Dtype | None" = None
    first_ffn_down_weighted: "Dtype | None" = None
    first_ffn_down_unweighted: "Dtype | None" = None
    attn_qk: "Dtype | None" = None
    output_head: "Dtype | None" = None
    ffn_gate_up_middle: "Dtype | None" = None
    ffn_down_8_experts: "Dtype | None" = None
    is_smallest: bool = False


def _role(name: str, form: str) -> Callable[["Dtype", Callable[..., Any]], Callable[..., Any]]:
    """Return a method of Dtype that registers a kernel for role `name`; `form`: its arguments, with block 1 also n."""

    def register(self: "Dtype", function: Callable[..., Any]) -> Callable[..., Any]:
        self.code[name] = CompiledFunction(function)
        return function

    register.__doc__ = f"Register a function {form}"
    return register


@dataclass(frozen=True, slots=True, eq=False)
class Dtype:
    """One element type. Each is a singleton, also when unpickled: types compare by identity.

    number               in files: ggml.h, enum ggml_type; None if files cannot have the type
    smaller              llama-quantize's substitute if rows are not whole blocks
    richer               llama-quantize's choice for matrices that are used more than others
    merge_dtype          type that merges write instead: the next larger of equal blocks whose codes can be chosen
    column_weights_need  where the type is written only with weights of columns: "always", or in the "blocks" of a model
    layout, points       of its codes, and points that they name, for merges and --calibrate; with neither, only packed
    mixes                mixes with this type, the usual one last
    code                 its kernels: unpack, dot, codes and scales (for rounded values), pack, weigh, snap, recode
    """

    name: str
    number: int | None
    block: int
    block_nbytes: int
    numpy: np.dtype
    smaller: "Dtype | None" = None
    richer: "Dtype | None" = None
    merge_dtype: "Dtype | None" = None
    column_weights_need: str = ""
    layout: CodeLayout | None = None
    points: GridPoints | None = None
    mixes: list[QuantMix] = field(default_factory=list)
    code: dict[str, CompiledFunction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        DTYPES_BY_NAME[self.name] = self

    def __repr__(self) -> str:
        return self.name

    def mix(self, name: str, file_type: int, **overrides: Any) -> None:
        self.mixes.append(QuantMix(name, file_type, self, **overrides))

    unpack = _role("unpack", "(y, x): unpacks the block at address x to f32 at address y.")
    dot = _role(
        "dot", "(x, w, n): dot product of n f32 at x and n packed at w; n is whole blocks and 32s."
    )
    scales = _role("scales", "(w): a chunk's scales; without code_offset the offsets follow.")
    pack = _role(
        "pack", "(y, x): packs finite f32 at x to a block at y; zeros if a scale is below f16."
    )
    weigh = _role(
        "weigh", "(y, x, w, spread): likewise; errors count by f32 weights at w, mean square of the row.",
    )  # fmt: skip
    snap = _role(
        "snap", "(y, x, w, t): likewise, onto the grid of table t, weighted by w unless w is 0."
    )
    recode = _role(
        "recode", "(y, x): a block at y gets codes for f32 at x and keeps scales; see dtypes/recode.",
    )  # fmt: skip

    def codes(
        self, max_code: int, *, code_offset: int = 0
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register a function (w, i) -> U8x64, the i-th 64 codes of a chunk at w; see CompiledFunction, int8_dot."""

        def declare(function: Callable[..., Any]) -> Callable[..., Any]:
            self.code["codes"] = CompiledFunction(function, False, code_offset, max_code)
            return function

        return declare

    def row_nbytes(self, width: int) -> int:
        """Return the bytes of a row of `width` elements; `width` must be whole blocks."""
        return width // self.block * self.block_nbytes

    def array_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the NumPy array that holds a tensor of `shape`: its last axis counts blocks."""
        return (*shape[:-1], shape[-1] // self.block) if shape else ()

    def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor that a NumPy array of `shape` holds: the inverse of array_shape."""
        return (*shape[:-1], shape[-1] * self.block) if shape else ()

    @property
    def chosen(self) -> bool:
        """Whether calibration (error feedback) can choose this type's codes while the scales of a block stay."""
        return self.layout is not None or self.points is not None

    @property
    def quantized(self) -> bool:
        return self.block > 1

    @property
    def file_type(self) -> int:
        """The number (llama_ftype) of a file whose matrices are of this type."""
        return self.mixes[-1].file_type

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return dtype_named, (self.name,)


class DtypeFamily(tuple[Dtype, ...]):
    """Several types as one: `@family.role` decorates make(dtype), which returns each type's function of the role."""

    def __getattr__(self, role: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def register(make: Callable[..., Any]) -> Callable[..., Any]:
            for dtype in self:
                function = make(dtype)
                function.__name__ = function.__qualname__ = f"{make.__name__}_{dtype.name}"
                getattr(dtype, role)(function)
            return make

        return register


def dtype_named(name: str) -> Dtype:
    """Return the type of this name, in a process that may not have loaded its module. Raises KeyError."""
    importlib.import_module("packtrain.dtypes")
    return DTYPES_BY_NAME[name]


def scalar_dtype(name: str, number: int | None, numpy: str) -> Dtype:
    """Define and register a type of single values: its number in files, or None, and the name of NumPy's type."""
    return Dtype(name, number, 1, np.dtype(numpy).itemsize, np.dtype(numpy))


def block_dtype(name: str, number: int, block: int, nbytes: int, **options: Any) -> Dtype:
    """Define and register a type of `block` values in `nbytes` bytes, its number in files; options: Dtype's fields."""
    return Dtype(name, number, block, nbytes, np.dtype([(name, f"V{nbytes}")]), **options)
