"""Merge LoRA adapters into a model; all other tensors are copied byte for byte."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packtrain.common.events import Events
from packtrain.common.files import check_output
from packtrain.common.options import COLUMNS, option, positional, required
from packtrain.common.text import plural
from packtrain.conversion.calibration.calibration_inputs import readings
from packtrain.conversion.calibration.merge_writer import Merge as Merging
from packtrain.conversion.calibration.rounding_types import named_types
from packtrain.data.text.text_streams import data_files
from packtrain.dtypes import MERGED, Dtype
from packtrain.engine.memory_plan import size_text
from packtrain.gguf import GGUF, Entry
from packtrain.models.lora import EMBEDDING
from packtrain.models.model_file import open_model
from packtrain.models.model_with_adapters import read_scaled, split_scale
from packtrain.models.rewrite_model import merged, stored_type, write_changed
from packtrain.workflows.calibration_data import calibration, within
from packtrain.workflows.quantization import Written, line, writable_dtype

HEAD = "output.weight"
CALIBRATE = "--calibrate DATA, with some of what the adapters were trained on, keeps more of what they learned"
AWARE = "the adapter was trained in the base's blocks, and is merged as it was trained"


@dataclass(frozen=True)
class Merge:
    """Write a model with adapters merged into it."""

    model: Path = positional("the base, a GGUF file")
    adapters: tuple[str, ...] = positional("adapters, GGUF files; FILE:SCALE adds SCALE times one")
    output: Path = required("the GGUF file to write", flags="-o")
    type: str | None = option(
        None,
        f"element type of the changed matrices (default: as in the base): {', '.join(map(str, MERGED))}",
    )
    tensor_type: tuple[str, ...] = option(
        (),
        "NAME=TYPE for changed matrices of this name, such as ffn_down=q8_0; repeatable",
        metavar="NAME=TYPE",
    )
    calibrate: Path | None = option(
        None,
        "conversations or text like the adapters' training data; the merge then keeps more of what they learned",
    )
    memory: str | None = option(
        None,
        "with --calibrate: limit of private memory, such as 2GiB; if it is tight, less of the data is read",
    )
    columns: str | None = option(None, COLUMNS, metavar="NAME=FIELD,…")
    overwrite: bool = option(False, "replace the output if it exists")


def merge(settings: Merge, events: Events) -> Written:
    """Write the file. Raises InputError and leaves an existing file as it was."""
    start_time = time.perf_counter()
    dtype = writable_dtype(settings.type, "--type", MERGED)
    base = GGUF(settings.model)
    adapted = (split_scale(text)[0] for text in settings.adapters)
    read = [*base.paths, *adapted, *data_files(settings.calibrate)]
    adapters = read_scaled(settings.adapters, base)
    check_output(settings.output, "-o", read, settings.overwrite)
    ignored = sorted({name for adapter, _ in adapters for name in adapter.ignored})
    if ignored:
        events.message(
            f"{plural(len(ignored), 'vector')} in the adapters left out, which no merge uses; the first: {ignored[0]}"
        )
    changes = merged(base, adapters)
    if EMBEDDING in changes and HEAD not in base.entries:
        events.message(f"{EMBEDDING} is also the output head: both are changed")

    def done(entry: Entry, stored: Dtype, error: float) -> None:
        narrow = f"  rows of {entry.shape[-1]} do not fill blocks of {dtype}"
        events.row(line(entry, stored, error) + (narrow if dtype not in (None, stored) else ""))

    name = settings.output.stem.encode(errors="replace").decode()
    types = named_types(settings.tensor_type, changes, base.entries)
    merging = None
    if settings.calibrate is not None or any(adapter.aware for adapter, _ in adapters):
        data = settings.calibrate is not None
        merging = Merging(open_model(settings.model), adapters, dtype, types, data=data)
    if merging is not None and (settings.calibrate is not None or merging.aware is not None):
        _calibrated(settings, merging, name, done, events)
    else:
        args = settings.output, base, changes
        write_changed(*args, name=name, dtype=dtype, types=types, done=done)
        if any(stored_type(base.entries[n], dtype).chosen for n in changes):
            events.message(CALIBRATE)
    weights = sum(math.prod(entry.shape) for entry in base.entries.values())
    nbytes, seconds = settings.output.stat().st_size, time.perf_counter() - start_time
    return Written(
        settings.output, len(changes), len(base.entries), base.nbytes, nbytes, weights, seconds
    )


def _calibrated(
    settings: Merge,
    merging: Merging,
    name: str,
    done: Callable[[Entry, Dtype, float], None],
    events: Events,
) -> None:
    """Write the file, calibrated on data or as it was trained. Raises DoesNotFit if --memory is too small."""
    if merging.aware is not None:
        events.message(AWARE)
        merging.write(settings.output, name, done=done)
        return
    assert settings.calibrate is not None
    columns, reading = settings.columns, None
    memory = settings.memory
    data = calibration(settings.calibrate, merging.base, events, columns=columns, memory=memory)
    if merging.calibrated:
        candidates = readings(merging.adapted, merging.calibrated, data.time, data.windows)
        reading = within(memory, candidates, "merge with --calibrate")
        events.message(f"merging {reading}, {size_text(reading.nbytes)}")
    with events.counting("merging", "block") as count:
        errors = merging.write(settings.output, name, reading, data, done=done, block=count)
    for tensor, error in errors.items():
        entry = merging.base.gguf.entries[tensor]
        events.row(f"{line(entry, merging.stored(tensor), error)} of what it computes")
