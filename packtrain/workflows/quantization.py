"""Quantize the weights of a GGUF file, with the types that llama-quantize chooses."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np

from packtrain.common.errors import InputError, printable
from packtrain.common.events import Events
from packtrain.common.files import check_output
from packtrain.common.options import COLUMNS, option, positional
from packtrain.dtypes import READABLE, WRITABLE, Dtype, f32
from packtrain.dtypes.element_type import Mix
from packtrain.gguf import GGUF, QUANTIZATION_VERSION, Deferred, Entry, Value, tensor_nbytes, write
from packtrain.kernels.quantized_arrays import Weighed, dequantize, packed, squares
from packtrain.models.quant_recipe import EMBEDDING as EMBEDDINGS
from packtrain.models.quant_recipe import MIXES, OUTPUT, types_of

PART = 1 << 20  # values that are converted at a time
MIB = 1 << 20
WAITING = 8 * MIB  # of converted values: writing and converting then both go on all the time
FILE_TYPE, VERSION = "general.file_type", "general.quantization_version"
DROPPED = ("general.quantized_by", "split.no", "split.count", "split.tensors.count")
WEIGHTS = "measure them with `packtrain imatrix`, and give --imatrix, or give data with --calibrate"
TYPES = ", ".join(str(dtype) for dtype in WRITABLE)


@dataclass(frozen=True)
class Quantize:
    """Write a model with its weights in other element types."""

    model: Path = positional("the model, a GGUF file")
    output: Path = positional("the GGUF file to write")
    type: str = positional(f"one of {', '.join(MIXES)}")
    pure: bool = option(False, "use one type for all matrices instead of a mix")
    output_tensor_type: str | None = option(None, f"element type of output.weight: {TYPES}")
    token_embedding_type: str | None = option(None, "element type of token_embd.weight")
    imatrix: Path | None = option(
        None,
        "importance matrix of the model, a file of `packtrain imatrix` or llama-imatrix: errors count by it",
        metavar="FILE",
    )
    calibrate: Path | None = option(
        None,
        "text or conversations like those the model is for: rounding then changes least what it computes on them",
        metavar="DATA",
    )
    memory: str | None = option(
        None,
        "with --calibrate: limit of private memory, such as 2GiB; if it is tight, less of the data is read",
    )
    columns: str | None = option(None, COLUMNS, metavar="NAME=FIELD,…")
    allow_requantize: bool = option(
        False,
        "also quantize weights that are already quantized, which loses more; to F32 nothing is lost",
    )
    overwrite: bool = option(False, "replace the output if it exists")


@dataclass(frozen=True, slots=True)
class Written:
    """A GGUF file converted from another one, and the bytes of its tensors before and after.

    changed  number of changed tensors, of `count`
    weights  number of values in the file
    """

    output: Path
    changed: int
    count: int
    before_nbytes: int
    nbytes: int
    weights: int
    seconds: float


def quantize(settings: Quantize, events: Events) -> Written:
    """Write the file. Raises InputError, for values only after writing began."""
    start_time, mix = time.perf_counter(), _mix(settings)
    gguf = GGUF(settings.model)
    types = types_of(
        gguf,
        mix,
        pure=settings.pure,
        output=writable_dtype(settings.output_tensor_type, "--output-tensor-type"),
        embedding=writable_dtype(settings.token_embedding_type, "--token-embedding-type"),
        weighed=settings.imatrix is not None,
    )
    _check(settings, gguf, types)
    by_column, origin = dict[str, np.ndarray](), dict[str, Value]()
    if settings.imatrix is not None:
        # what few files need takes a third of the time that loading takes
        weighed = import_module("packtrain.workflows.imatrix_data")
        by_column, origin = weighed.weights(settings, gguf, events)
    elif settings.calibrate is not None:
        by_column = _alike(gguf, types)
    _check_weights(gguf, types, by_column)
    converted = {
        name: Deferred(
            types[name],
            entry.shape,
            _maker(gguf, entry, types[name], mix.dtype, by_column.get(name), events),
        )
        for name, entry in gguf.entries.items()
    }
    values = metadata(gguf, mix) | origin
    if settings.calibrate is None:
        write(settings.output, values, converted, WAITING)
    else:
        calibrated = import_module("packtrain.workflows.calibrated_quantization")
        calibrated.write(settings, types, values, converted, events)
    before, after = (sum(t.nbytes for t in part.values()) for part in (gguf.entries, converted))
    weights = sum(math.prod(entry.shape) for entry in gguf.entries.values())
    changed = sum(types[name] != entry.dtype for name, entry in gguf.entries.items())
    seconds = time.perf_counter() - start_time
    return Written(settings.output, changed, len(types), before, after, weights, seconds)


def _alike(gguf: GGUF, types: Mapping[str, Dtype]) -> dict[str, np.ndarray]:
    """Weights of 1 for matrices that are written only with weights, until data give others."""
    return {
        name: np.ones((math.prod(e.shape[:-2]), e.shape[-1]), np.float32)
        for name, e in gguf.entries.items()
        if name.startswith("blk.") and types[name].demanding
    }


def _check_weights(
    gguf: GGUF, types: Mapping[str, Dtype], weights: Mapping[str, np.ndarray]
) -> None:
    """Raise InputError if a tensor gets a type that is written only with weights of columns, and has none."""
    # importance matrices and data are of blocks
    outside = {OUTPUT: "--output-tensor-type"} | dict.fromkeys(EMBEDDINGS, "--token-embedding-type")
    for name, entry in gguf.entries.items():
        dtype, free = types[name], ("blocks" if name in outside else "")
        if dtype is not entry.dtype and name not in weights and dtype.demanding not in ("", free):
            advice = f"choose another for it with {outside[name]}" if name in outside else WEIGHTS
            raise InputError(
                f"type: {name} would be {dtype}, which is written only with weights of its columns",
                advice,
            )


def _mix(settings: Quantize) -> Mix:
    if settings.calibrate is not None and settings.imatrix is not None:
        raise InputError("--calibrate: the data says more than --imatrix; give one of them")
    mix = MIXES.get(settings.type.upper())
    if mix is None:
        raise InputError(f"type: {settings.type} is unknown; it must be one of {', '.join(MIXES)}")
    return mix


def metadata(gguf: GGUF, mix: Mix) -> dict[str, Value]:
    """The metadata of the file, with the keys that describe the stored types replaced."""
    numbers = {FILE_TYPE: mix.number, VERSION: QUANTIZATION_VERSION}
    retained = {key: value for key, value in gguf.values.items() if key not in DROPPED}
    return retained | {key: Value("u32", number) for key, number in numbers.items()}


def writable_dtype(
    name: str | None, field: str, allowed: tuple[Dtype, ...] = WRITABLE
) -> Dtype | None:
    """The element type of this name, None for None. Raises InputError for one that cannot be written."""
    if name is None:
        return None
    match = next((dtype for dtype in allowed if dtype.name.lower() == name.lower()), None)
    if match is None:
        choices = ", ".join(map(str, allowed))
        raise InputError(f"{field}: {name} is unknown; it must be one of {choices}")
    return match


def _check(settings: Quantize, gguf: GGUF, types: dict[str, Dtype]) -> None:
    """Checks that need no work."""
    if gguf.metadata.get("general.type") == "adapter":
        raise InputError(
            f"{gguf.path} is an adapter, which stays in f32; merge it first (`packtrain merge`)"
        )
    read = [*gguf.paths, settings.imatrix]
    if settings.calibrate is not None:
        read += import_module("packtrain.data.text.text_streams").data_files(settings.calibrate)
    check_output(settings.output, "output", read, settings.overwrite)
    for name, entry in gguf.entries.items():
        stored, new_dtype = entry.dtype, types[name]
        if stored is new_dtype:
            continue
        if stored not in READABLE:
            raise InputError(f"{gguf.path}: {name} is {stored}, which cannot be converted")
        if stored.quantized and new_dtype is not f32 and not settings.allow_requantize:
            raise InputError(
                f"{gguf.path}: {name} is already quantized, to {stored}; use the original, or "
                "--allow-requantize, which loses more"
            )
        if entry.shape[-1] % new_dtype.block:
            raise InputError(
                f"{gguf.path}: rows of {name} have {entry.shape[-1]} values; {new_dtype} packs {new_dtype.block} each"
            )


def _maker(
    gguf: GGUF,
    entry: Entry,
    dtype: Dtype,
    default_dtype: Dtype,
    weights: np.ndarray | None,
    events: Events,
) -> Callable[[], Iterator[np.ndarray]]:
    """A generator that converts a tensor part by part when it is written, and reports the result."""
    location = f"{gguf.path}: {entry.name}"

    def done(error: float) -> None:
        width = entry.shape[-1] if entry.shape else 1
        narrow = f"  rows of {width} do not fill blocks of {default_dtype}"
        events.row(line(entry, dtype, error) + narrow * bool(width % default_dtype.block))

    def kept() -> Iterator[np.ndarray]:
        for part in _parts(gguf.array(entry.name)):
            # types that cannot be read are only copied
            if entry.dtype in READABLE and not math.isfinite(squares(_floats(part))):
                raise InputError(f"{location} has values that are not finite; all must be")
            yield part
        events.row(line(entry, dtype))

    def converted() -> Iterator[np.ndarray]:
        array = gguf.array(entry.name)
        if weights is None:
            return packed(location, map(_floats, _parts(array)), dtype, done)
        stack = zip(array.reshape(len(weights), -1, array.shape[-1]), weights, strict=True)
        parts = (
            Weighed(_floats(part), matrix_weights)
            for matrix, matrix_weights in stack
            for part in _parts(matrix)
        )
        return packed(location, parts, dtype, done)

    return kept if dtype == entry.dtype else converted


def _floats(array: np.ndarray) -> np.ndarray:
    """The values as f32, without a copy if they are."""
    return array if array.dtype == np.float32 else dequantize(array)


def _parts(array: np.ndarray) -> Iterator[np.ndarray]:
    """An array's rows, PART values at a time."""
    if array.size:
        rows = array.reshape(-1, array.shape[-1] if array.ndim else 1)
        step = max(1, PART * len(rows) // array.size)
        yield from (rows[i : i + step] for i in range(0, len(rows), step))


def line(entry: Entry, dtype: Dtype, error: float | None = None) -> str:
    """A table row of a tensor: name, shape, types, sizes and error (None if it was copied)."""
    prefix = f"{printable(entry.name):32} {list(entry.shape)!s:>16} {entry.dtype!s:>5}"
    if error is None:
        return f"{prefix} kept {entry.nbytes / MIB:18.2f} MiB"
    after = tensor_nbytes(entry.shape, dtype)
    sizes = f"{entry.nbytes / MIB:8.2f} -> {after / MIB:.2f} MiB"
    return f"{prefix} -> {dtype!s:5} {sizes}  error {error:.2%}"
