"""Quantize the weights of a GGUF file, with the types that llama-quantize chooses."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np

from packtrain import gguf as gguf_files
from packtrain.common.errors import InputError, printable
from packtrain.common.events import Events
from packtrain.common.files import check_output
from packtrain.common.mapped_file import pages_within, passing_pages
from packtrain.common.option_rules import check_rules
from packtrain.common.options import BOTH_LIMITS, COLUMNS, PAGES, option, positional
from packtrain.dtypes import READABLE, WRITABLE, Dtype, f32
from packtrain.dtypes.element_type import QuantMix
from packtrain.gguf import GGUF, QUANTIZATION_VERSION, DeferredTensor, MetadataValue, TensorInfo
from packtrain.gguf.gguf_writer import PASSING_NBYTES
from packtrain.kernels.quant import quantized_arrays
from packtrain.kernels.quant.quantized_arrays import WeightedValues, packed, sum_of_squares
from packtrain.models.quant_recipe import EMBEDDING_NAMES as EMBEDDINGS
from packtrain.models.quant_recipe import MIXES, OUTPUT, tensor_dtypes

VALUES_PER_CHUNK = 1 << 20  # values converted at a time
MIB = 1 << 20
WAITING = 8 * MIB  # bytes of converted values that may wait, so that writing and converting overlap
FILE_TYPE_KEY, VERSION_KEY = "general.file_type", "general.quantization_version"
DROPPED_KEYS = ("general.quantized_by", "split.no", "split.count", "split.tensors.count")
WEIGHTS = "measure them with `packtrain imatrix`, and give --imatrix, or give data with --calibrate"
CALIBRATION_MEMORY = "with --calibrate: limit of private memory, such as 2GiB; if it is tight, less of the data is read"
TYPE_NAMES = ", ".join(str(dtype) for dtype in WRITABLE)


@dataclass(frozen=True)
class QuantizeSettings:
    """Write a model with its weights in other element types."""

    model: Path = positional("the model, a GGUF file")
    output: Path = positional("the GGUF file to write")
    type: str = positional(f"one of {', '.join(MIXES)}")
    pure: bool = option(False, "use one type for all matrices instead of a mix")
    output_tensor_type: str | None = option(None, f"element type of output.weight: {TYPE_NAMES}")
    token_embedding_type: str | None = option(None, "element type of token_embd.weight")
    imatrix: Path | None = option(
        None, "importance matrix of the model, a file of `packtrain imatrix` or llama-imatrix: errors count by it",
        metavar="FILE",
    )  # fmt: skip
    calibrate: Path | None = option(
        None,
        "text or conversations like those the model is for: rounding then changes least what it computes on them",
        metavar="DATA", conflicts={"imatrix": "{flag}: the data says more than --imatrix; give one of them"},
    )  # fmt: skip
    memory: str | None = option(None, CALIBRATION_MEMORY, requires="calibrate")
    resident: str | None = option(None, PAGES, metavar="SIZE", conflicts=BOTH_LIMITS)
    columns: str | None = option(None, COLUMNS, metavar="NAME=FIELD,…", requires="calibrate")
    allow_requantize: bool = option(
        False, "also quantize weights that are already quantized, which loses more; to F32 nothing is lost",
    )  # fmt: skip
    overwrite: bool = option(False, "replace the output if it exists")


@dataclass(frozen=True, slots=True)
class WrittenModel:
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


def quantize(settings: QuantizeSettings, events: Events) -> WrittenModel:
    """Quantize a model into a file; returns counts. Raises DoesNotFit; InputError, for values only while writing."""
    start_time, mix = time.perf_counter(), _requested_mix(settings)
    gguf = GGUF(settings.model)
    types = tensor_dtypes(
        gguf, mix, pure=settings.pure, output=writable_dtype(settings.output_tensor_type, "--output-tensor-type"),
        embedding=writable_dtype(settings.token_embedding_type, "--token-embedding-type"),
        weighed=settings.imatrix is not None,
    )  # fmt: skip
    _check_inputs(settings, gguf, types)
    by_column, imatrix_metadata = dict[str, np.ndarray](), dict[str, MetadataValue]()
    if settings.imatrix is not None:
        # few calls need these modules, which take a third of the loading time
        imatrix_module = import_module("packtrain.workflows.imatrix_data")
        by_column, imatrix_metadata = imatrix_module.weights(settings, gguf, types, events)
    elif settings.calibrate is not None:
        # weights of 1 for matrices whose types need weights, until data give others
        by_column = {
            name: np.ones((math.prod(e.shape[:-2]), e.shape[-1]), np.float32)
            for name, e in gguf.entries.items()
            if name.startswith("blk.") and types[name].column_weights_need
        }
    _check_weights(gguf, types, by_column)
    converted = dict[str, DeferredTensor]()
    for tensor_name, entry in gguf.entries.items():
        dtype, weights = types[tensor_name], by_column.get(tensor_name)
        make_parts = _maker(gguf, entry, dtype, mix.dtype, weights, events)
        converted[tensor_name] = DeferredTensor(dtype, entry.shape, make_parts)
    metadata_values = file_metadata(gguf, mix) | imatrix_metadata
    if settings.calibrate is None:
        with pages_within(settings.resident, lambda: 4 * WAITING, PASSING_NBYTES):
            gguf_files.write_gguf(settings.output, metadata_values, converted, WAITING)
    else:
        calibrated_module = import_module("packtrain.workflows.calibrated_quantization")
        calibrated_module.write(settings, types, metadata_values, converted, events)
    before, after = (sum(t.nbytes for t in part.values()) for part in (gguf.entries, converted))
    num_weights = sum(math.prod(tensor_entry.shape) for tensor_entry in gguf.entries.values())
    changed = sum(types[tensor_name] != entry.dtype for tensor_name, entry in gguf.entries.items())
    seconds = time.perf_counter() - start_time
    return WrittenModel(settings.output, changed, len(types), before, after, num_weights, seconds)


def _check_weights(
    gguf: GGUF, types: Mapping[str, Dtype], weights_by_tensor: Mapping[str, np.ndarray]
) -> None:
    """Raise InputError if a tensor's new type needs a weight for each column (importance), and there is none."""
    # importance matrices and data cover only blocks
    outside = {OUTPUT: "--output-tensor-type"} | dict.fromkeys(EMBEDDINGS, "--token-embedding-type")
    for name, entry in gguf.entries.items():
        dtype, weightless_demand = types[name], ("blocks" if name in outside else "")
        is_changed = dtype is not entry.dtype and name not in weights_by_tensor
        if is_changed and dtype.column_weights_need not in ("", weightless_demand):
            advice = f"choose another for it with {outside[name]}" if name in outside else WEIGHTS
            fact = "which is written only with weights of its columns"
            raise InputError(f"type: {name} would be {dtype}, {fact}", advice)


def _requested_mix(settings: QuantizeSettings) -> QuantMix:
    check_rules(settings)
    mix = MIXES.get(settings.type.upper())
    if mix is None:
        raise InputError(f"type: {settings.type} is unknown; it must be one of {', '.join(MIXES)}")
    return mix


def file_metadata(gguf: GGUF, mix: QuantMix) -> dict[str, MetadataValue]:
    """Return the file's metadata, with the keys that describe the stored types replaced."""
    numbers = {FILE_TYPE_KEY: mix.file_type, VERSION_KEY: QUANTIZATION_VERSION}
    kept_values = {key: value for key, value in gguf.values.items() if key not in DROPPED_KEYS}
    return kept_values | {key: MetadataValue("u32", number) for key, number in numbers.items()}


def writable_dtype(
    name: str | None, flag_name: str, allowed_dtypes: tuple[Dtype, ...] = WRITABLE
) -> Dtype | None:
    """Return the element type `name`, None for None. Raises InputError, for `flag_name`, if it cannot be written."""
    if name is None:
        return None
    match = next((dtype for dtype in allowed_dtypes if dtype.name.lower() == name.lower()), None)
    if match is None:
        type_names = ", ".join(map(str, allowed_dtypes))
        raise InputError(f"{flag_name}: {name} is unknown; it must be one of {type_names}")
    return match


def _check_inputs(settings: QuantizeSettings, gguf: GGUF, types: dict[str, Dtype]) -> None:
    """Raise InputError for unsuitable inputs, outputs or types, before any work."""
    if gguf.metadata.get("general.type") == "adapter":
        fact = f"{gguf.path} is an adapter, which stays in f32; merge it first (`packtrain merge`)"
        raise InputError(fact)
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
            fact = f"{gguf.path}: rows of {name} have {entry.shape[-1]} values"
            raise InputError(f"{fact}; {new_dtype} packs {new_dtype.block} each")


def _maker(
    gguf: GGUF, entry: TensorInfo, dtype: Dtype, default_dtype: Dtype, weights: np.ndarray | None, events: Events,
) -> Callable[[], Iterator[np.ndarray]]:  # fmt: skip
    """Return a function that yields a tensor's parts in `dtype` when it is written, and then reports the rounding
    error; `weights` (matrices, columns) weigh errors, and `default_dtype` is the type before fitting rows."""
    location = f"{gguf.path}: {entry.name}"

    def report_error(error: float) -> None:
        row_width = entry.shape[-1] if entry.shape else 1
        narrow_note = f"  rows of {row_width} do not fill blocks of {default_dtype}"
        events.row(line(entry, dtype, error) + narrow_note * bool(row_width % default_dtype.block))

    def copied_values() -> Iterator[np.ndarray]:
        for part in _value_chunks(gguf.array(entry.name)):
            # types that cannot be read are only copied
            if entry.dtype in READABLE and not math.isfinite(sum_of_squares(_as_floats(part))):
                raise InputError(f"{location} has values that are not finite; all must be")
            yield part
        events.row(line(entry, dtype))

    def converted_values() -> Iterator[np.ndarray]:
        array = gguf.array(entry.name)
        if weights is None:
            return packed(location, map(_as_floats, _value_chunks(array)), dtype, report_error)
        stack = zip(array.reshape(len(weights), -1, array.shape[-1]), weights, strict=True)
        weighed_chunks = (
            WeightedValues(_as_floats(value_chunk), matrix_weights)
            for matrix, matrix_weights in stack
            for value_chunk in _value_chunks(matrix)
        )
        return packed(location, weighed_chunks, dtype, report_error)

    return copied_values if dtype == entry.dtype else converted_values


def _as_floats(array: np.ndarray) -> np.ndarray:
    """Return the values as f32, without a copy if they are f32."""
    return array if array.dtype == np.float32 else quantized_arrays.dequantize(array)


def _value_chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield an array's rows, about VALUES_PER_CHUNK values at a time."""
    if array.size:
        value_rows = array.reshape(-1, array.shape[-1] if array.ndim else 1)
        step = max(1, VALUES_PER_CHUNK * len(value_rows) // array.size)
        for i in range(0, len(value_rows), step):
            with passing_pages(rows := value_rows[i : i + step]):
                yield rows


def line(entry: TensorInfo, dtype: Dtype, error: float | None = None) -> str:
    """Format a row of the printed table: name, shape, types, sizes and relative error (None: the tensor was copied)."""
    row_prefix = f"{printable(entry.name):32} {list(entry.shape)!s:>16} {entry.dtype!s:>5}"
    if error is None:
        return f"{row_prefix} kept {entry.nbytes / MIB:18.2f} MiB"
    new_nbytes = gguf_files.tensor_nbytes(entry.shape, dtype)
    size_text = f"{entry.nbytes / MIB:8.2f} -> {new_nbytes / MIB:.2f} MiB"
    return f"{row_prefix} -> {dtype!s:5} {size_text}  error {error:.2%}"
