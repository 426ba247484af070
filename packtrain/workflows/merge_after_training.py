"""The end of a fine-tuning run: merge the adapter into the base, measure the loss, and suggest a better merge.

The memory of the run is free by then; merging stays within the same budget. Losses that validation measured during
the run are not measured again."""

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from packtrain.common.errors import DoesNotFit
from packtrain.common.events import Events
from packtrain.common.mapped_file import more_pages, page_budget
from packtrain.common.memory import private_nbytes, release_memory
from packtrain.common.text import plural
from packtrain.conversion.calibration.calibration_inputs import ReadingPlan, best_reading
from packtrain.conversion.calibration.merge_writer import AdapterMerge
from packtrain.conversion.calibration.rounding_types import larger_types, parse_tensor_types
from packtrain.dtypes import DTYPES, Dtype
from packtrain.engine.memory_plan import size_text
from packtrain.models.adapter_file import Adapter, fit_adapter, read_adapter
from packtrain.models.lora import A, B
from packtrain.models.model_file import ModelFile, open_model
from packtrain.models.model_with_adapters import adapted, merge_only_weights
from packtrain.models.transformer import weights
from packtrain.planner.step_shape import StepShape
from packtrain.training.checkpoints import TrainingProgress
from packtrain.training.finetune_job import ADAPTER, TunedModel, name_of
from packtrain.training.finetune_settings import TuneSettings
from packtrain.training.model_loss import loss_executor
from packtrain.training.sample_batches import SampleBatches
from packtrain.training.training_engine import evaluate
from packtrain.training.training_job import HEAD_NBYTES, TrainingJob
from packtrain.training.training_loop import BEST_FILE
from packtrain.workflows.planned_run import PlannedRun

MIN_KEPT_SHARE = 0.95  # share of the adapter's gain that a merge should keep
TRIAL = ".trial.part"  # this suffix lets the next run remove it if this one is killed
NO_MEMORY_MESSAGE = "--memory leaves too little for a calibrated merge"


@dataclass(frozen=True, slots=True)
class MergeLosses:
    """Validation losses of base, result and adapter (None: none was merged), each as stored in its file."""

    base: float
    merged: float
    adapter_loss: float | None = None

    @property
    def kept_share(self) -> float:
        """The share, 1 for all, of the adapter's gain in loss that the merge keeps; 1 if it gains nothing."""
        gain = self.base - (self.merged if self.adapter_loss is None else self.adapter_loss)
        return (self.base - self.merged) / gain if gain > 0 else 1.0

    def __str__(self) -> str:
        middle = "" if self.adapter_loss is None else f"with the adapter {self.adapter_loss:.4f}, "
        last = "merged" if self.adapter_loss is not None else "tuned"
        has_gain = self.adapter_loss is not None and self.adapter_loss < self.base
        kept_text = f" ({self.kept_share:.0%} of the gain)" if has_gain else ""
        return f"validation loss: base {self.base:.4f}, {middle}{last} {self.merged:.4f}{kept_text}"


@dataclass(frozen=True, slots=True)
class FinishedFinetune:
    """A fine-tuning run after its last step: writes the result, measures it, and suggests a better merge."""

    job: TrainingJob
    shape: StepShape
    progress: TrainingProgress
    budget: int | None
    events: Events

    @property
    def settings(self) -> TuneSettings:
        return cast(TuneSettings, self.job.settings)

    @property
    def subject(self) -> TunedModel:
        return cast(TunedModel, self.job.model)

    def merge_and_measure(self) -> None:
        """Merge the adapter if there is one; report the losses of base, adapter and result, and a better merge."""
        adapter_path, adapter = self.settings.folder / ADAPTER, None
        if not self.settings.full:
            adapter = fit_adapter(read_adapter(adapter_path), adapter_path, self.subject.model.gguf)
        error_by_matrix, left_out = None, merge_only_weights(adapter) if adapter is not None else []
        if left_out:
            self.events.message(
                f"llama.cpp leaves out an adapter's {', '.join(left_out)} beside such a base: use the merged file there"
            )
        if adapter is not None and self.settings.merge != "none":
            merge = make_merge(self.subject, adapter, self.settings.tensor_type)
            error_by_matrix = self._write_merged(merge, self.settings.output)
            self._report_narrow_adapters(merge)
        if self.job.valid is None:
            return
        try:
            losses = self._measure_merge_losses(adapter)
        except DoesNotFit as error:
            return self.events.message(f"the losses are not measured: {error}")
        self.events.message(str(losses))
        has_loss = losses.adapter_loss is not None
        if adapter is not None and has_loss and losses.kept_share < MIN_KEPT_SHARE:
            self._suggest_merge(adapter, losses, error_by_matrix)

    # ---- merging

    def _write_merged(self, merge: AdapterMerge, output_path: Path) -> Mapping[str, float] | None:
        """Write the merged file; returns each matrix's relative output error, None without calibration."""
        reading, spare_nbytes = None, 0
        if is_calibrated(self.settings) and merge.calibrated:
            release_memory()
            limit_nbytes = None if self.budget is None else self.budget - private_nbytes()
            pages = page_budget.get()
            reading = reading_of(self.job, merge, limit_nbytes, pages.nbytes if pages else 0)
            if reading is None:
                self.events.message(f"{NO_MEMORY_MESSAGE}: the adapter is merged by plain rounding")
            elif limit_nbytes is not None:
                spare_nbytes = limit_nbytes - reading.nbytes
        self.events.message("merging the adapter …")
        with more_pages(spare_nbytes), self.events.counting("merging", "block") as count:
            data = cast(SampleBatches, self.job.train)
            errors = merge.write_file(output_path, name_of(output_path), reading, data, block=count)
        return errors if reading is not None else None

    def _report_narrow_adapters(self, merge: AdapterMerge) -> None:
        names = {name for adapter, _ in merge.adapters for name in adapter.lora_pairs}
        narrow = [
            n for n in names if merge.dtype not in (None, merge.stored(n), merge.types.get(n))
        ]
        if narrow and not merge.types:
            self.events.message(
                f"--type {self.settings.type}: rows of {plural(len(narrow), 'matrix', 'matrices')}"
                " do not fill blocks of this type; they keep their type"
            )

    # ---- measuring

    def _measure_merge_losses(self, adapter: Adapter | None) -> MergeLosses:
        base, progress = self.subject.model, self.progress
        uses_best = self.settings.patience and (self.settings.folder / BEST_FILE).exists()
        last = progress.best if uses_best else progress.last
        adapter_loss = None
        if adapter is not None:
            adapted_model = adapted(base, [(adapter, 1.0)], aware=adapter.aware)
            adapter_loss = last
            if not math.isfinite(last):
                adapter_loss = self._validation_loss(adapted_model, "the adapter")
        result_loss, is_unmerged = adapter_loss, self.settings.merge == "none"
        if result_loss is None or not is_unmerged:
            result_loss = self._validation_loss(open_model(self.settings.output), "the result")
        base_loss = progress.base
        if not math.isfinite(base_loss):
            base_loss = self._validation_loss(base, "the base")
        return MergeLosses(base_loss, result_loss, None if is_unmerged else adapter_loss)

    def _validation_loss(self, model: ModelFile, label: str) -> float:
        batch_losses = loss_executor(
            model, self.shape.micro_batch_size, self.shape.seq_len, self.shape.chunk, target=self.settings.target,
        )  # fmt: skip
        with self.events.counting(f"validation of {label}", "batch") as count:
            return evaluate(batch_losses, self.job.counted(count), self.shape.preference).loss

    # ---- more

    def _suggest_merge(
        self, adapter: Adapter, losses: MergeLosses, error_by_matrix: Mapping[str, float] | None
    ) -> None:
        """Suggest a better merge: calibration, or larger types where relative errors are largest, found by trial."""
        command = f"packtrain finetune -o {shlex.quote(str(self.settings.output))} --resume"
        if error_by_matrix is None:
            if adapter.aware:
                return
            if self.settings.merge == "plain":
                self.events.message(
                    f"warning: plain rounding loses much of the gain; merge again with: {command} --merge calibrated"
                )
                return
        trial = self.settings.folder / TRIAL
        try:
            now = make_merge(self.subject, adapter, self.settings.tensor_type)
            for types in larger_types(now.calibrated, now.base.gguf.entries, error_by_matrix or {}):
                trial.unlink(missing_ok=True)  # the previous trial
                flags = flags_of(types)
                merge = make_merge(self.subject, adapter, (*self.settings.tensor_type, *flags))
                self.events.message(
                    f"the merge keeps less than {MIN_KEPT_SHARE:.0%} of the gain; trying {', '.join(flags)} …"
                )
                self._write_merged(merge, trial)
                trial_loss = self._validation_loss(open_model(trial), "the trial")
                kept_gain = MergeLosses(losses.base, trial_loss, losses.adapter_loss).kept_share
                if kept_gain >= MIN_KEPT_SHARE:
                    extra_nbytes = trial.stat().st_size - self.settings.output.stat().st_size
                    flag_text = " ".join(f"--tensor-type {shlex.quote(flag)}" for flag in flags)
                    self.events.message(
                        f"with these types the merge keeps {kept_gain:.0%}, and the file is"
                        f" {size_text(extra_nbytes)} larger: {command} {flag_text}"
                    )
                    return
        finally:
            trial.unlink(missing_ok=True)
        self.events.message(
            f"warning: no merge keeps {MIN_KEPT_SHARE:.0%} of what the adapter gains; use the adapter with the base,"
            " unmerged"
        )


# ---- before the run


def note(run_plan: PlannedRun) -> Iterator[str]:
    """Yield lines for the printed plan about the memory and the data of the merge after the run."""
    adapter = _placeholder_adapter(run_plan.job)
    if adapter is None:
        return
    settings = cast(TuneSettings, run_plan.job.settings)
    merge = make_merge(cast(TunedModel, run_plan.job.model), adapter, settings.tensor_type)
    if not merge.calibrated or not is_calibrated(settings):
        return
    limit = None if run_plan.budget is None else run_plan.budget - run_plan.plans.baseline_nbytes
    window = run_plan.plans.window
    reading = reading_of(run_plan.job, merge, limit, window.nbytes if window else 0)
    if reading is None:
        yield f"{NO_MEMORY_MESSAGE}: plain rounding will keep less of what is learned"
        return
    description = f"after the last step, on {reading.tokens:,} tokens of the data; not in the total"
    yield f"  {'merge':<10}{size_text(reading.nbytes):>10}  {description}"


def merge_files(job: TrainingJob) -> Iterator[tuple[Path, str, int]]:
    """Yield (path, description, most bytes) of the files that a merge writes besides those of the model."""
    adapter = _placeholder_adapter(job)
    if adapter is None:
        return
    settings, subject = cast(TuneSettings, job.settings), cast(TunedModel, job.model)
    merge = replace(make_merge(subject, adapter, settings.tensor_type), use_data=False)
    base = merge.base.gguf.nbytes + HEAD_NBYTES
    planned_nbytes = subject.output_files()[settings.output]
    if base + merge.extra_nbytes > planned_nbytes:
        yield settings.output, "its larger types", base + merge.extra_nbytes - planned_nbytes
    trials = [*larger_types(merge.calibrated, merge.base.gguf.entries, {})]
    if trials and is_calibrated(settings) and job.valid is not None:
        largest_merge = make_merge(subject, adapter, (*settings.tensor_type, *flags_of(trials[-1])))
        yield settings.folder / TRIAL, "a trial of larger types", base + largest_merge.extra_nbytes


def _placeholder_adapter(job: TrainingJob) -> Adapter | None:
    """Return a stand-in for the adapter that a run will merge, zeros that take no memory; None without a merge."""
    config = job.config.still
    if not isinstance(job.model, TunedModel) or config.lora is None:
        return None
    if job.model.settings.merge == "none":
        return None
    shapes = {weight_name: leaf.spec.shape for weight_name, leaf in weights(config).items()}
    names = [weight_name.removesuffix(A) for weight_name in shapes if weight_name.endswith(A)]
    zero_tensors = {
        n + end: np.broadcast_to(np.float32(0), shapes[n + end]) for n in names for end in (A, B)
    }
    matrix_pairs = {name: (zero_tensors[name + A], zero_tensors[name + B]) for name in names}
    return Adapter(config.architecture, config.lora.alpha, matrix_pairs, aware=config.lora.aware)


def flags_of(dtype_by_kind: Mapping[str, Dtype]) -> list[str]:
    """Format types by kind of matrix, such as ffn_down, as --tensor-type takes them."""
    return [f"{matrix_kind}={dtype}" for matrix_kind, dtype in dtype_by_kind.items()]


def is_calibrated(settings: TuneSettings) -> bool:
    return settings.merge == "calibrated" and not settings.aware


def reading_of(
    job: TrainingJob, merge: AdapterMerge, limit: int | None, page_nbytes: int
) -> ReadingPlan | None:
    """Return how much of the run's data a calibrated merge reads at a time within `limit` private bytes, together with
    `page_nbytes` of pages (0: not limited); None if nothing fits."""
    data = cast(SampleBatches, job.train)
    target = job.settings.target
    size = merge.sizing_model, merge.calibrated, data.time, data.windows
    return best_reading(*size, limit, target, page_nbytes)


def make_merge(
    subject: TunedModel, adapter: Adapter, tensor_types: tuple[str, ...] = ()
) -> AdapterMerge:
    """Create the merge that a run's settings ask for; `tensor_types`: texts NAME=TYPE for some matrices."""
    dtype = DTYPES[subject.settings.type] if subject.settings.type else None
    types = parse_tensor_types(tensor_types, adapter.lora_pairs, subject.model.gguf.entries)
    data = is_calibrated(subject.settings)
    return AdapterMerge(subject.model, [(adapter, 1.0)], dtype, types, subject.extra_metadata, data)
