"""Quantizing with data (--calibrate): blocks are rounded so that they change least what they compute on it."""

from collections.abc import Mapping

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.events import Events
from packtrain.common.files import atomic_path
from packtrain.conversion.calibration.calibrated_rounding import calibrate
from packtrain.conversion.calibration.calibration_inputs import reading_plans
from packtrain.dtypes import PACKABLE, Dtype
from packtrain.engine.memory_plan import size_text
from packtrain.gguf import DeferredTensor, MetadataValue
from packtrain.gguf import write_gguf as write_file
from packtrain.kernels.quant.quantized_arrays import quantize_measured
from packtrain.models.lora import EMBEDDING
from packtrain.models.model_file import ModelFile, open_model
from packtrain.models.rewrite_model import unpacked
from packtrain.workflows.calibration_data import calibration, enough, limited_reading
from packtrain.workflows.quantization import QuantizeSettings, line

TOKENS = 1 << 14  # most tokens that are read to calibrate
NOTHING = "--calibrate: no matrix of a block gets a type whose codes can be chosen; leave it out"
ALREADY = "has matrices in these types already, which would be copied; give its F32 or F16 file"


def calibrated_types(tensor_types: Mapping[str, Dtype], model: ModelFile) -> dict[str, Dtype]:
    """Return the new types, by name, of the block matrices that are quantized anew: data chooses how to round these."""
    entries = model.gguf.entries
    new_types = ((n, dtype) for n, dtype in tensor_types.items() if dtype != entries[n].dtype)
    return {n: dtype for n, dtype in new_types if n.startswith("blk.") and dtype.quantized}


def write(
    settings: QuantizeSettings, tensor_types: Mapping[str, Dtype], values: Mapping[str, MetadataValue],
    tensors: Mapping[str, DeferredTensor], events: Events,
) -> None:  # fmt: skip
    """Write the quantized file, the blocks' matrices rounded with data; `values`: its metadata, `tensors`: values to
    store. Raises InputError; DoesNotFit by --memory."""
    assert settings.calibrate is not None
    model = open_model(settings.model)
    tensor_entries = model.gguf.entries
    changed = {n: dtype for n, dtype in tensor_types.items() if dtype != tensor_entries[n].dtype}
    inside = calibrated_types(tensor_types, model)
    if not any(dtype.chosen for dtype in inside.values()):
        is_unchanged = not changed and any(dtype.chosen for dtype in tensor_types.values())
        raise InputError(f"--calibrate: {settings.model} {ALREADY}" if is_unchanged else NOTHING)
    data = enough(settings.calibrate, calibration(settings, model, events))
    # load kernels and tables now, so that the measured memory counts them
    for dtype in set(changed.values()) & set(PACKABLE):
        zero_row = np.zeros((1, dtype.block), np.float32)
        quantize_measured(zero_row, dtype, zero_row[0] if dtype.column_weights_need else None)
    candidates = reading_plans(model, inside, data.time, data.windows, max_tokens=TOKENS)
    names = (*inside, *({EMBEDDING} & changed.keys()))
    unpacked_rows = {name: unpacked(model.gguf, name) for name in names}
    limited = limited_reading(settings, candidates, "quantize with --calibrate")
    with limited as reading, atomic_path(settings.output) as temporary_path:
        events.message(f"quantizing {reading}, {size_text(reading.nbytes)}")
        write_file(temporary_path, values, tensors)
        with events.counting("quantizing", "block") as report_progress:
            args = reading.read(data), reading.max_columns, report_progress
            error_by_tensor = calibrate(
                temporary_path, model, unpacked_rows, *args, searched=unpacked_rows.keys()
            )
    for name, error in error_by_tensor.items():
        events.row(f"{line(tensor_entries[name], tensor_types[name], error)} of what it computes")
