"""The smallest file that keeps what tuning gained: a tuned model written in each type, and its losses measured.

The gain of tuning is the loss of the base less the loss of the tuned model, on data that neither was trained on. A
file keeps a share of this gain: rounding its weights costs the rest."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from packtrain.common.errors import InputError
from packtrain.common.events import Counted, Events
from packtrain.common.files import atomic_path, check_output, remove_temp_files, require_existing
from packtrain.common.option_rules import check_rules
from packtrain.common.options import COLUMNS, option, positional, required
from packtrain.conversion.calibration.calibration_inputs import reading_plans
from packtrain.conversion.calibration.merge_writer import AdapterMerge
from packtrain.data.text.text_streams import data_files
from packtrain.gguf import GGUF
from packtrain.models.model_file import open_model
from packtrain.models.model_with_adapters import read_scaled
from packtrain.models.quant_recipe import MIXES, tensor_dtypes
from packtrain.training.model_loss import MeanEstimate
from packtrain.workflows.adapter_merge import MergeSettings, merge
from packtrain.workflows.calibrated_quantization import calibrated_types
from packtrain.workflows.calibration_data import calibration, compile_kernels, fitting_reading
from packtrain.workflows.eval_data import EvaluateSettings
from packtrain.workflows.evaluation import evaluate
from packtrain.workflows.quantization import FILE_TYPE_KEY, QuantizeSettings, quantize

DEFAULT_TYPES = "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k"
BASE_TYPE_LABEL = "as the base"
PLAIN_ROUNDING, WITH_DATA, UNCHANGED_FILE, AWARE_TRAINED = "plain", "with data", "as it is", "aware"

WriteFile = Callable[[Path], object]  # writes the file


@dataclass(frozen=True)
class ChooseSettings:
    """Write a tuned model as the smallest file that keeps what tuning gained."""

    model: Path = positional("the base, a GGUF file")
    tuned: Path = positional("the tuned model, or an adapter of the base, a GGUF file")
    output: Path = required("the GGUF file to write", flags="-o")
    data: Path = required(
        "text or conversations that were not trained on, to measure the loss; of a folder, the test file, else valid,"
        " else train"
    )
    type: tuple[str, ...] = option(
        (), f"a type to try, repeatable (default: {', '.join(DEFAULT_TYPES)})", metavar="TYPE"
    )
    calibrate: Path | None = option(
        None, "conversations or text like the training data: each type is tried with it, too"
    )
    also: tuple[Path, ...] = option((), "a file to measure as it is; repeatable", metavar="FILE")
    aware: tuple[Path, ...] = option(
        (), "a file that `finetune --aware` wrote, to measure as it is and show under its type; repeatable",
        metavar="FILE",
    )  # fmt: skip
    kl: bool = option(False, "show the KL divergence of each file from the unrounded tuned model")
    keep: float = option(0.98, "the share of the gain that must be kept", min_value=0, max_value=1)
    memory: str | None = option(
        None, "limit of private memory, such as 2GiB", conflicts={"kl": "whose memory is not planned"},
    )  # fmt: skip
    ctx: int | None = option(None, "tokens of a window, as in `eval`", flags="-c", min_value=3)
    columns: str | None = option(None, COLUMNS, metavar="NAME=FIELD,…")
    svg: Path | None = option(None, "draw the files' sizes against what they keep", metavar="FILE")
    overwrite: bool = option(False, "replace the output if it exists")


@dataclass(frozen=True, slots=True)
class TypeTrial:
    """A trial: a file written in one type, and its loss.

    name    the type's name, or the file's path
    how     how its weights were rounded: plainly, with data, while training (aware), or not at all
    nbytes  size of the whole file
    loss    nats per token
    kept    share of tuning's gain that the file keeps
    kl      mean KL divergence from the tuned model's predictions, nats; None without --kl
    """

    name: str
    how: str
    nbytes: int
    loss: float
    kept: float
    kl: MeanEstimate | None = None


@dataclass(frozen=True, slots=True)
class TypeChoiceResult:
    """All trials, and the file that was written: the smallest that keeps enough, else the file that keeps most.

    base, tuned  losses, nats per token; the tuned model's before any rounding
    """

    output: Path
    base: float
    tuned: float
    keep: float
    best: TypeTrial
    tries: list[TypeTrial] = field(repr=False)

    @property
    def enough(self) -> bool:
        """Whether the best type keeps the share of the gain that --keep asks for."""
        return self.best.kept >= self.keep


class ProgressEvents(Events):
    """Events that pass on only the progress of inner tasks."""

    def __init__(self, events: Events) -> None:
        self.events = events

    @contextmanager
    def counting(self, label: str, unit: str) -> Iterator[Counted]:
        with self.events.counting(label, unit) as report_progress:
            yield report_progress


def choose(settings: ChooseSettings, events: Events) -> TypeChoiceResult:
    """Try each type, write the best file, and return all trials. Raises InputError, DoesNotFit, Interrupted."""
    _check_inputs(settings)
    compile_kernels(settings.memory)
    output = settings.output.resolve()
    remove_temp_files(output.parent)
    trial, merged_path = (output.with_name(f".{output.name}.{n}.{os.getpid()}.part") for n in "ab")
    try:
        with atomic_path(output) as best_path:
            return _measure_types(settings, events, trial, best_path, merged_path)
    finally:
        for temporary_path in (trial, merged_path):
            temporary_path.unlink(missing_ok=True)


def _check_inputs(settings: ChooseSettings) -> None:
    """Raise InputError for unsuitable inputs and outputs, before any work."""
    check_rules(settings)
    input_paths = [*GGUF(settings.model).paths, *GGUF(settings.tuned).paths]
    data_paths = [(settings.data, "--data")]
    data_paths += [(data_path, "--also") for data_path in settings.also]
    data_paths += [(data_path, "--aware") for data_path in settings.aware]
    if settings.calibrate is not None:
        data_paths.append((settings.calibrate, "--calibrate"))
    for data_path, flag_name in data_paths:
        require_existing(data_path, flag_name)
    for type_name in settings.type:
        if type_name.upper() not in MIXES:
            raise InputError(f"--type {type_name} is unknown; it must be one of {', '.join(MIXES)}")
        if _needs_data(type_name) and settings.calibrate is None:
            fact = f"--type {type_name} is written only with weights of its columns"
            raise InputError(f"{fact}; give data with --calibrate")
    input_paths += [file for data_path, _ in data_paths for file in data_files(data_path)]
    check_output(settings.output, "-o", input_paths, settings.overwrite)


def _measure_types(
    settings: ChooseSettings, events: Events, trial: Path, best_path: Path, merged_path: Path
) -> TypeChoiceResult:
    """Write all candidates to `trial`, measure; leave the best at best_path, a merged adapter at merged_path."""
    progress_events, tuned_path = ProgressEvents(events), settings.tuned
    if _is_adapter_file(tuned_path):
        adapters = (str(tuned_path),)
        merge_settings = MergeSettings(settings.model, adapters, merged_path, "f32", overwrite=True)
        merge(merge_settings, progress_events)
        tuned_path = merged_path
    measure_file = partial(_measure_file, settings, progress_events)
    (before, _), (after, _) = measure_file(settings.model), measure_file(tuned_path)
    if not after < before:
        raise InputError(
            f"{settings.tuned}: its loss on {settings.data} is {after:.4f} and the base's {before:.4f}; without a gain"
            " there is nothing to keep"
        )
    events.message(f"loss: base {before:.4f}, tuned {after:.4f}")
    _check_memory(settings, tuned_path, progress_events)
    type_trials = list[TypeTrial]()
    for name, method, write_file in _candidates(settings, tuned_path, progress_events):
        write_file(trial)
        trial_loss, kl = measure_file(trial, tuned_path if settings.kl else None)
        kept_share = (before - trial_loss) / (before - after)
        type_trial = TypeTrial(name, method, trial.stat().st_size, trial_loss, kept_share, kl)
        events.row(trial_line(type_trial))
        type_trials.append(type_trial)
        best_trial = min(type_trials, key=partial(_trial_rank, settings.keep))
        if best_trial is type_trial:
            os.replace(trial, best_path)
    return TypeChoiceResult(settings.output, before, after, settings.keep, best_trial, type_trials)


def _check_memory(settings: ChooseSettings, tuned: Path, events: Events) -> None:
    """Raise DoesNotFit, before the first trial, if --memory is too small to write one of the types with data."""
    if settings.memory is None or settings.calibrate is None:
        return
    model = open_model(tuned)
    rows = calibration(settings, model, events)
    mixes = [MIXES[name.upper()] for name in settings.type or DEFAULT_TYPES]
    typed_models = [
        (model, calibrated_types(tensor_dtypes(model.gguf, mix), model)) for mix in mixes
    ]
    if _is_adapter_file(settings.tuned):
        base = open_model(settings.model)
        adapters = read_scaled((str(settings.tuned),), base.gguf)
        merge_job = AdapterMerge(base, adapters, None, {}, use_data=True)
        typed_models.append((merge_job.adapted, merge_job.calibrated))
    least_readings = [
        min(reading_plans(typed_model, types, rows.time, rows.windows), key=attrgetter("nbytes"))
        for typed_model, types in typed_models
        if types
    ]
    if least_readings:
        largest = max(least_readings, key=attrgetter("nbytes"))
        fitting_reading(settings.memory, [largest], "write all of the types with --calibrate")


def _trial_rank(min_kept_share: float, trial: TypeTrial) -> tuple[bool, float]:
    """Return a sort key: trials that keep `min_kept_share` first, by bytes; then those that keep most of the gain."""
    return (False, trial.nbytes) if trial.kept >= min_kept_share else (True, -trial.kept)


def _needs_data(type_name: str) -> bool:
    """Return whether a type is written only with weights of columns, which data gives."""
    return bool(MIXES[type_name.upper()].dtype.column_weights_need)


def _is_adapter_file(path: Path) -> bool:
    return GGUF(path).metadata.get("general.type") == "adapter"


def _measure_file(
    settings: ChooseSettings, events: Events, path: Path, kl_base: Path | None = None
) -> tuple[float, MeanEstimate | None]:
    """Return (mean loss of the file on the data in nats, mean KL divergence from `kl_base`, None without)."""
    measured = EvaluateSettings(
        (path,), settings.data, ctx=settings.ctx, columns=settings.columns, kl_base=kl_base, memory=settings.memory
    )  # fmt: skip
    result = evaluate(measured, events)
    return result.loss().value, result.mean_kl()


def _candidates(
    settings: ChooseSettings, tuned: Path, events: Events
) -> Iterator[tuple[str, str, WriteFile]]:
    """Yield (type's name, how it is rounded, function that writes the file to a path) for each file to try."""
    rounding_methods: list[tuple[str, Path | None]] = [(PLAIN_ROUNDING, None)]
    if settings.calibrate is not None:
        rounding_methods.append((WITH_DATA, settings.calibrate))
    is_quantized = any(entry.dtype.quantized for entry in GGUF(settings.model).entries.values())
    if _is_adapter_file(settings.tuned) and is_quantized:
        for method, data_path in rounding_methods:
            yield BASE_TYPE_LABEL, method, partial(_write_merged, settings, data_path, events)
    for name in settings.type or DEFAULT_TYPES:
        for method, data_path in rounding_methods:
            if data_path is not None or not _needs_data(name):
                write_file = partial(_quantize, settings, tuned, name, data_path, events)
                yield name.lower(), method, write_file
    for tuned_path in settings.aware:
        file_type = GGUF(tuned_path).metadata.get(FILE_TYPE_KEY)
        type_names = [name.lower() for name, mix in MIXES.items() if mix.file_type == file_type]
        label = next(iter(type_names), str(tuned_path))
        yield label, AWARE_TRAINED, partial(_copy_file, tuned_path)
    for tuned_path in settings.also:
        yield str(tuned_path), UNCHANGED_FILE, partial(_copy_file, tuned_path)


def _write_merged(settings: ChooseSettings, data: Path | None, events: Events, path: Path) -> None:
    """Write to `path` the base with the adapter merged into the base's own types, calibrated with `data` if given."""
    merge_args = settings.model, (str(settings.tuned),), path
    merge(MergeSettings(*merge_args, **_calibration_options(settings, data)), events)


def _quantize(
    settings: ChooseSettings, tuned: Path, name: str, data: Path | None, events: Events, path: Path
) -> None:
    options = _calibration_options(settings, data)
    quantize(QuantizeSettings(tuned, path, name, allow_requantize=True, **options), events)


def _calibration_options(settings: ChooseSettings, data: Path | None) -> dict[str, Any]:
    """Return, by name, settings for writing a trial over the previous one, calibrated with `data` unless None."""
    data_options = {"calibrate": data, "memory": settings.memory, "columns": settings.columns}
    return {"overwrite": True, **(data_options if data else {})}


def _copy_file(source_path: Path, path: Path) -> None:
    with open(source_path, "rb") as source, open(path, "wb") as file:
        shutil.copyfileobj(source, file)
        file.flush()
        os.fsync(file.fileno())


def trial_line(trial: TypeTrial) -> str:
    """Format a trial as a row of the table."""
    file = f"{trial.name:12} {trial.how:10} {trial.nbytes / (1 << 20):10.2f} MiB"
    kl = f"  KL {trial.kl.text(6)}" if trial.kl else ""
    return f"{file}  loss {trial.loss:.4f}  keeps {trial.kept:.1%}{kl}"
