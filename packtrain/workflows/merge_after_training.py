"""The end of a fine-tuning run: merge the adapter into the base, measure the loss, and suggest a better merge.

The memory of the run is free by then; merging stays within the same budget. Losses that validation measured during
the run are not measured again.
"""

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from packtrain.common.events import Events
from packtrain.common.memory import private_nbytes, settle
from packtrain.common.text import plural
from packtrain.conversion.calibration.calibration_inputs import Reading, reading
from packtrain.conversion.calibration.merge_writer import Merge
from packtrain.conversion.calibration.rounding_types import larger, named_types
from packtrain.dtypes import DTYPES, Dtype
from packtrain.engine.memory_plan import size_text
from packtrain.models.adapter_file import Adapter, fitted, read_adapter
from packtrain.models.lora import A, B
from packtrain.models.model_file import ModelFile, open_model
from packtrain.models.model_with_adapters import adapted, merged_only
from packtrain.models.transformer import weights
from packtrain.planner.step_shape import StepShape
from packtrain.training.checkpoints import Progress
from packtrain.training.finetune_job import ADAPTER, Tuned, name_of
from packtrain.training.finetune_settings import TuneSettings
from packtrain.training.model_loss import losses_of
from packtrain.training.sample_batches import SampleBatches
from packtrain.training.training_engine import evaluate
from packtrain.training.training_job import HEAD_NBYTES, Job
from packtrain.training.training_loop import BEST
from packtrain.workflows.planned_run import Ready

ENOUGH = 0.95  # share of the adapter's gain that a merge should keep
TRIAL = ".trial.part"  # this suffix lets the next run remove it if this one is killed
NO_MEMORY = "--memory leaves too little for a calibrated merge"


@dataclass(frozen=True, slots=True)
class Losses:
    """Validation losses of base, adapter and result, each as stored in its file."""

    base: float
    merged: float
    adapter: float | None = None

    @property
    def kept(self) -> float:
        """The share of the adapter's gain that the merge keeps; 1 if it gains nothing."""
        gain = self.base - (self.merged if self.adapter is None else self.adapter)
        return (self.base - self.merged) / gain if gain > 0 else 1.0

    def __str__(self) -> str:
        middle = "" if self.adapter is None else f"with the adapter {self.adapter:.4f}, "
        last = "merged" if self.adapter is not None else "tuned"
        gains = self.adapter is not None and self.adapter < self.base
        kept_text = f" ({self.kept:.0%} of the gain)" if gains else ""
        return f"validation loss: base {self.base:.4f}, {middle}{last} {self.merged:.4f}{kept_text}"


@dataclass(frozen=True, slots=True)
class End:
    """A fine-tuning run after its last step."""

    job: Job
    shape: StepShape
    progress: Progress
    budget: int | None
    events: Events

    @property
    def settings(self) -> TuneSettings:
        return cast(TuneSettings, self.job.settings)

    @property
    def subject(self) -> Tuned:
        return cast(Tuned, self.job.subject)

    def finish(self) -> None:
        """Merge the adapter if there is one; report the losses of base, adapter and result, and a better merge."""
        path, adapter = self.settings.folder / ADAPTER, None
        if not self.settings.full:
            adapter = fitted(read_adapter(path), path, self.subject.model.gguf)
        errors, left_out = None, merged_only(adapter) if adapter is not None else []
        if left_out:
            self.events.message(
                f"llama.cpp leaves out an adapter's {', '.join(left_out)} beside such a base: use the merged file there"
            )
        if adapter is not None and self.settings.merge != "none":
            merge = merge_of(self.subject, adapter, self.settings.tensor_type)
            errors = self._merge(merge, self.settings.output)
            self._report_narrow(merge)
        if self.job.valid is None:
            return
        losses = self._losses(adapter)
        self.events.message(str(losses))
        if losses.adapter is not None and losses.kept < ENOUGH and adapter is not None:
            self._advise(adapter, losses, errors)

    # ---- merging

    def _merge(self, merge: Merge, output: Path) -> Mapping[str, float] | None:
        """Write the file; returns the relative output error of each calibrated matrix, or None without calibration."""
        reading = None
        if calibrates(self.settings) and merge.calibrated:
            settle()
            limit = None if self.budget is None else self.budget - private_nbytes()
            reading = reading_of(self.job, merge, limit)
            if reading is None:
                self.events.message(f"{NO_MEMORY}: the adapter is merged by plain rounding")
        self.events.message("merging the adapter …")
        with self.events.counting("merging", "block") as count:
            data = cast(SampleBatches, self.job.train)
            errors = merge.write(output, name_of(output), reading, data, block=count)
        return errors if reading is not None else None

    def _report_narrow(self, merge: Merge) -> None:
        names = {name for adapter, _ in merge.adapters for name in adapter.pairs}
        narrow = [
            n for n in names if merge.dtype not in (None, merge.stored(n), merge.types.get(n))
        ]
        if narrow and not merge.types:
            self.events.message(
                f"--type {self.settings.type}: rows of {plural(len(narrow), 'matrix', 'matrices')}"
                " do not fill blocks of it; they keep their type"
            )

    # ---- measuring

    def _losses(self, adapter: Adapter | None) -> Losses:
        base, progress = self.subject.model, self.progress
        decided = self.settings.patience and (self.settings.folder / BEST).exists()
        last = progress.best if decided else progress.last
        adapter_loss = None
        if adapter is not None:
            adapted_model = adapted(base, [(adapter, 1.0)], aware=adapter.aware)
            adapter_loss = last if math.isfinite(last) else self._loss(adapted_model, "the adapter")
        tuned, is_unmerged = adapter_loss, self.settings.merge == "none"
        if tuned is None or not is_unmerged:
            tuned = self._loss(open_model(self.settings.output), "the result")
        before = progress.base if math.isfinite(progress.base) else self._loss(base, "the base")
        return Losses(before, tuned, None if is_unmerged else adapter_loss)

    def _loss(self, model: ModelFile, label: str) -> float:
        run = losses_of(
            model, self.shape.rows, self.shape.time, self.shape.chunk, target=self.settings.target
        )
        with self.events.counting(f"validation of {label}", "batch") as count:
            return evaluate(run, self.job.counted(count), self.shape.preference).loss

    # ---- more

    def _advise(self, adapter: Adapter, losses: Losses, errors: Mapping[str, float] | None) -> None:
        """Suggest a better merge: calibration, or larger types for the matrices that lose most, found by trial."""
        command = f"packtrain finetune -o {shlex.quote(str(self.settings.output))} --resume"
        if errors is None:
            if adapter.aware:
                return
            if self.settings.merge == "plain":
                self.events.message(
                    f"warning: plain rounding loses much of the gain; merge again with: {command} --merge calibrated"
                )
                return
            errors = {}
        trial = self.settings.folder / TRIAL
        try:
            now = merge_of(self.subject, adapter, self.settings.tensor_type)
            for types in larger(now.calibrated, now.base.gguf.entries, errors):
                trial.unlink(missing_ok=True)  # the previous trial
                flags = flags_of(types)
                merge = merge_of(self.subject, adapter, (*self.settings.tensor_type, *flags))
                self.events.message(
                    f"the merge keeps less than {ENOUGH:.0%} of the gain; trying {', '.join(flags)} …"
                )
                self._merge(merge, trial)
                kept_gain = Losses(
                    losses.base, self._loss(open_model(trial), "the trial"), losses.adapter
                ).kept
                if kept_gain >= ENOUGH:
                    extra_nbytes = trial.stat().st_size - self.settings.output.stat().st_size
                    options = " ".join(f"--tensor-type {shlex.quote(flag)}" for flag in flags)
                    self.events.message(
                        f"with these types the merge keeps {kept_gain:.0%}, and the file is"
                        f" {size_text(extra_nbytes)} larger:"
                        f" {command} {options}"
                    )
                    return
        finally:
            trial.unlink(missing_ok=True)
        self.events.message(
            f"warning: no merge keeps {ENOUGH:.0%} of what the adapter gains; use the adapter with the base, unmerged"
        )


# ---- before the run


def note(run_plan: Ready) -> Iterator[str]:
    """Lines about the merge, for the printed plan."""
    adapter = _unlearnt(run_plan.job)
    if adapter is None:
        return
    settings = cast(TuneSettings, run_plan.job.settings)
    merge = merge_of(cast(Tuned, run_plan.job.subject), adapter, settings.tensor_type)
    if not merge.calibrated or not calibrates(settings):
        return
    limit = None if run_plan.budget is None else run_plan.budget - run_plan.plans.baseline
    reading = reading_of(run_plan.job, merge, limit)
    if reading is None:
        yield f"{NO_MEMORY}: plain rounding will keep less of what is learned"
        return
    description = f"after the last step, on {reading.tokens:,} tokens of the data; not in the total"
    yield f"  {'merge':<10}{size_text(reading.nbytes):>10}  {description}"


def space(job: Job) -> Iterator[tuple[Path, str, int]]:
    """Files that a merge writes in addition to those of the subject: path, description, most bytes."""
    adapter = _unlearnt(job)
    if adapter is None:
        return
    settings, subject = cast(TuneSettings, job.settings), cast(Tuned, job.subject)
    merge = replace(merge_of(subject, adapter, settings.tensor_type), data=False)
    base, planned_nbytes = merge.base.gguf.nbytes + HEAD_NBYTES, subject.files()[settings.output]
    if base + merge.grown > planned_nbytes:
        yield settings.output, "its larger types", base + merge.grown - planned_nbytes
    trials = [*larger(merge.calibrated, merge.base.gguf.entries, {})]
    if trials and calibrates(settings) and job.valid is not None:
        largest_merge = merge_of(subject, adapter, (*settings.tensor_type, *flags_of(trials[-1])))
        yield settings.folder / TRIAL, "a trial of larger types", base + largest_merge.grown


def _unlearnt(job: Job) -> Adapter | None:
    """A stand-in for the adapter that a run will merge, of zeros that take no memory; None if it merges none."""
    config = job.config.still
    if not isinstance(job.subject, Tuned) or config.lora is None:
        return None
    if job.subject.settings.merge == "none":
        return None
    shapes = {name: leaf.shape for name, leaf in weights(config).items()}
    names = [name.removesuffix(A) for name in shapes if name.endswith(A)]
    nothing = {
        n + end: np.broadcast_to(np.float32(0), shapes[n + end]) for n in names for end in (A, B)
    }
    pairs = {name: (nothing[name + A], nothing[name + B]) for name in names}
    return Adapter(config.architecture, config.lora.alpha, pairs, aware=config.lora.aware)


def flags_of(types: Mapping[str, Dtype]) -> list[str]:
    """Types by kind of matrix, as --tensor-type takes them."""
    return [f"{kind}={dtype}" for kind, dtype in types.items()]


def calibrates(settings: TuneSettings) -> bool:
    return settings.merge == "calibrated" and not settings.aware


def reading_of(job: Job, merge: Merge, limit: int | None) -> Reading | None:
    """How much of the run's data a calibrated merge can read within a number of bytes."""
    data = cast(SampleBatches, job.train)
    target = job.settings.target
    return reading(merge.sized, merge.calibrated, data.time, data.windows, limit, target)


def merge_of(subject: Tuned, adapter: Adapter, tensor_types: tuple[str, ...] = ()) -> Merge:
    """The merge that the settings of a run ask for."""
    dtype = DTYPES[subject.settings.type] if subject.settings.type else None
    types = named_types(tensor_types, adapter.pairs, subject.model.gguf.entries)
    data = calibrates(subject.settings)
    return Merge(subject.model, [(adapter, 1.0)], dtype, types, subject.more, data)
