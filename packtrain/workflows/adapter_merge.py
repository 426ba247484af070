"""Merge LoRA adapters into a model; all other tensors are copied byte for byte."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from packtrain.common.events import Events
from packtrain.common.files import check_output
from packtrain.common.mapped_file import pages_within
from packtrain.common.option_rules import check_rules
from packtrain.common.options import BOTH_LIMITS, COLUMNS, PAGES, option, positional, required
from packtrain.common.text import plural
from packtrain.conversion.calibration.calibration_inputs import ReadingPlan, reading_plans
from packtrain.conversion.calibration.merge_writer import AdapterMerge as Merging
from packtrain.conversion.calibration.rounding_types import parse_tensor_types
from packtrain.data.text.text_streams import data_files
from packtrain.dtypes import MERGEABLE, Dtype
from packtrain.engine.memory_plan import size_text
from packtrain.gguf import GGUF, TensorInfo
from packtrain.gguf.gguf_writer import PASSING_NBYTES
from packtrain.models.lora import EMBEDDING
from packtrain.models.model_file import open_model
from packtrain.models.model_with_adapters import read_scaled, split_scale
from packtrain.models.rewrite_model import merged_rows, stored_dtype, write_changed
from packtrain.workflows.calibration_data import calibration, limited_reading
from packtrain.workflows.quantization import CALIBRATION_MEMORY, WrittenModel, line, writable_dtype

OUTPUT_HEAD = "output.weight"
CALIBRATE_ADVICE = "--calibrate DATA, with some of what the adapters were trained on, keeps more of what they learned"
AWARE_MESSAGE = "the adapter was trained in the base's blocks, and is merged as it was trained"


@dataclass(frozen=True)
class MergeSettings:
    """Write a model with adapters merged into it."""

    model: Path = positional("the base, a GGUF file")
    adapters: tuple[str, ...] = positional("adapters, GGUF files; FILE:SCALE adds SCALE times one")
    output: Path = required("the GGUF file to write", flags="-o")
    type: str | None = option(
        None, f"element type of the changed matrices (default: as in the base): {', '.join(map(str, MERGEABLE))}",
    )  # fmt: skip
    tensor_type: tuple[str, ...] = option(
        (), "NAME=TYPE for changed matrices of this name, such as ffn_down=q8_0; repeatable",
        metavar="NAME=TYPE",
    )  # fmt: skip
    calibrate: Path | None = option(
        None, "conversations or text like the adapters' training data; the merge then keeps more of what they learned",
    )  # fmt: skip
    memory: str | None = option(None, CALIBRATION_MEMORY, requires="calibrate")
    resident: str | None = option(None, PAGES, metavar="SIZE", conflicts=BOTH_LIMITS)
    columns: str | None = option(None, COLUMNS, metavar="NAME=FIELD,…", requires="calibrate")
    overwrite: bool = option(False, "replace the output if it exists")


def merge(settings: MergeSettings, events: Events) -> WrittenModel:
    """Merge adapters into the base as a file; returns its counts. On InputError or DoesNotFit an old file stays."""
    check_rules(settings)
    start_time = time.perf_counter()
    dtype = writable_dtype(settings.type, "--type", MERGEABLE)
    base = GGUF(settings.model)
    adapter_paths = (split_scale(text)[0] for text in settings.adapters)
    input_paths = [*base.paths, *adapter_paths, *data_files(settings.calibrate)]
    adapters = read_scaled(settings.adapters, base)
    check_output(settings.output, "-o", input_paths, settings.overwrite)
    if ignored := sorted({name for adapter, _ in adapters for name in adapter.ignored}):
        events.message(
            f"{plural(len(ignored), 'vector')} in the adapters left out, which no merge uses; the first: {ignored[0]}"
        )
    changes = merged_rows(base, adapters)
    if EMBEDDING in changes and OUTPUT_HEAD not in base.entries:
        events.message(f"{EMBEDDING} is also the output head: both are changed")

    def done(entry: TensorInfo, stored: Dtype, error: float) -> None:
        narrow = f"  rows of {entry.shape[-1]} do not fill blocks of {dtype}"
        events.row(line(entry, stored, error) + (narrow if dtype not in (None, stored) else ""))

    model_name = settings.output.stem.encode(errors="replace").decode()
    types = parse_tensor_types(settings.tensor_type, changes, base.entries)
    merge_job, has_data = None, settings.calibrate is not None
    if has_data or any(adapter.aware for adapter, _ in adapters):
        merge_job = Merging(open_model(settings.model), adapters, dtype, types, use_data=has_data)
    if merge_job is not None and (has_data or merge_job.aware is not None):
        _write_calibrated(settings, merge_job, model_name, done, events)
    else:
        args = settings.output, base, changes
        with pages_within(settings.resident, lambda: 0, PASSING_NBYTES):
            write_changed(*args, name=model_name, dtype=dtype, types=types, on_tensor=done)
        if any(stored_dtype(base.entries[n], dtype).chosen for n in changes):
            events.message(CALIBRATE_ADVICE)
    num_weights = sum(math.prod(entry.shape) for entry in base.entries.values())
    nbytes, seconds = settings.output.stat().st_size, time.perf_counter() - start_time
    return WrittenModel(
        settings.output, len(changes), len(base.entries), base.nbytes, nbytes, num_weights, seconds
    )


def _write_calibrated(
    settings: MergeSettings, merge_job: Merging, name: str, done: Callable[[TensorInfo, Dtype, float], None],
    events: Events,
) -> None:  # fmt: skip
    """Write the merged file, `name` in its metadata: matrices are rounded as `--aware` rounded them if it trained the
    adapter, else calibrated on data. Calls done(entry, new type, error) for each. Raises DoesNotFit."""
    limited: AbstractContextManager[ReadingPlan | None]
    limited = pages_within(settings.resident, lambda: 0, PASSING_NBYTES)
    if merge_job.aware is not None:
        events.message(AWARE_MESSAGE)
        with limited:
            merge_job.write_file(settings.output, name, done=done)
        return
    data = calibration(settings, merge_job.base, events)
    if merge_job.calibrated:
        candidates = reading_plans(merge_job.adapted, merge_job.calibrated, data.time, data.windows)
        limited = limited_reading(settings, candidates, "merge with --calibrate")
    with limited as reading, events.counting("merging", "block") as count:
        if reading is not None:
            events.message(f"merging {reading}, {size_text(reading.nbytes)}")
        errors = merge_job.write_file(settings.output, name, reading, data, done=done, block=count)
    for tensor_name, error in errors.items():
        entry = merge_job.base.gguf.entries[tensor_name]
        events.row(f"{line(entry, merge_job.stored(tensor_name), error)} of what it computes")
