"""Quantizing with data (--calibrate): blocks are rounded so that they change least what they compute on it."""

from collections.abc import Mapping

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.events import Events
from packtrain.common.files import atomic_path
from packtrain.conversion.calibration.calibrated_rounding import calibrate
from packtrain.conversion.calibration.calibration_inputs import readings
from packtrain.dtypes import PACKED, Dtype
from packtrain.engine.memory_plan import size_text
from packtrain.gguf import Deferred, Value
from packtrain.gguf import write as write_file
from packtrain.kernels.quantized_arrays import quantize_measured
from packtrain.models.lora import EMBEDDING
from packtrain.models.model_file import open_model
from packtrain.models.rewrite_model import unpacked
from packtrain.workflows.calibration_data import calibration, enough, within
from packtrain.workflows.quantization import Quantize, line

TOKENS = 1 << 14  # most that are read to calibrate
NOTHING = "--calibrate: no matrix of a block gets a type whose codes can be chosen; leave it out"
ALREADY = (
    "has its matrices in these types already, and they would be copied; give its F32 or F16 file"
)


def write(
    settings: Quantize,
    types: Mapping[str, Dtype],
    values: Mapping[str, Value],
    tensors: Mapping[str, Deferred],
    events: Events,
) -> None:
    """Write the file, its blocks rounded with data. Raises InputError, and DoesNotFit if --memory is too small."""
    assert settings.calibrate is not None
    model = open_model(settings.model)
    entries = model.gguf.entries
    changed = {n: dtype for n, dtype in types.items() if dtype != entries[n].dtype}
    inside = {n: dtype for n, dtype in changed.items() if n.startswith("blk.") and dtype.quantized}
    if not any(dtype.chosen for dtype in inside.values()):
        already = not changed and any(dtype.chosen for dtype in types.values())
        raise InputError(f"--calibrate: {settings.model} {ALREADY}" if already else NOTHING)
    read = calibration(
        settings.calibrate, model, events, columns=settings.columns, memory=settings.memory
    )
    data = enough(settings.calibrate, read)
    # loads kernels and tables, which count then
    for dtype in set(changed.values()) & set(PACKED):
        zero_row = np.zeros((1, dtype.block), np.float32)
        quantize_measured(zero_row, dtype, zero_row[0] if dtype.demanding else None)
    candidates = readings(model, inside, data.time, data.windows, tokens=TOKENS)
    reading = within(settings.memory, candidates, "quantize with --calibrate")
    events.message(f"quantizing {reading}, {size_text(reading.nbytes)}")
    rows = {name: unpacked(model.gguf, name) for name in (*inside, *({EMBEDDING} & changed.keys()))}
    with atomic_path(settings.output) as part:
        write_file(part, values, tensors)
        with events.counting("quantizing", "block") as count:
            args = reading.read(data), reading.width, count
            errors = calibrate(part, model, rows, *args, searched=rows.keys())
    for name, error in errors.items():
        events.row(f"{line(entries[name], types[name], error)} of what it computes")
