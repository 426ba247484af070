"""The result of a training run, and how a notebook shows it."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packtrain.common.text import clock, plural
from packtrain.engine.memory_plan import size_text
from packtrain.training.checkpoints import TrainingProgress
from packtrain.training.monitoring import METRICS_FILE
from packtrain.training.monitoring.curve import LossCurve
from packtrain.training.monitoring.metrics_file import read
from packtrain.training.monitoring.notebook import Html, html_table, to_frame
from packtrain.workflows.behaviour_check import END_LABELS, CheckedAnswer, read_answers
from packtrain.workflows.planned_run import PlannedRun


@dataclass(frozen=True, slots=True, repr=False)
class TrainingResult:
    """The result of a training run.

    output         the model, a GGUF file; not written yet if `stopped`
    folder         checkpoints, metrics.jsonl, loss.svg, plan.html
    plan           the plan; compare `plan.planned_nbytes` with the measured `peak_nbytes`
    progress       steps, tokens, seconds, validation losses
    stopped        whether the run was asked to stop; the same call with resume=True continues
    """

    output: Path
    folder: Path
    plan: PlannedRun
    progress: TrainingProgress
    peak_nbytes: int
    stopped: bool

    @property
    def ends(self) -> tuple[int, int]:
        """Answers whose end token the result predicts, and all with an end; (0, 0) if unknown (mask_prompt=False)."""
        return self.progress.ends

    @property
    def answers(self) -> tuple[CheckedAnswer, ...]:
        """Held-out questions with the answers of base and tuned model, and whether each ended by itself."""
        return read_answers(self.folder)

    @property
    def losses(self) -> list[float]:
        """The loss of every step, in nats per token."""
        return [r["loss"] for r in self.history]

    @property
    def history(self) -> list[dict[str, Any]]:
        """The record of every step, as in metrics.jsonl: step, tokens, loss, lr, val_loss where it validated."""
        return [r for r in read(self.folder / METRICS_FILE) if "loss" in r]

    def to_frame(self) -> Any:
        """The history as a pandas DataFrame, a row for each step. Raises InputError without pandas."""
        return to_frame(self.history)

    def plot(self) -> Html:
        """Training and validation loss over steps, as a notebook shows it."""
        curve = LossCurve()
        for step_record in self.history:
            curve.add(step_record)
        return Html(curve.svg())

    def __repr__(self) -> str:
        steps, progress = plural(self.progress.step, "step"), self.progress
        loss = f"; validation loss {progress.last:.4f}" if math.isfinite(progress.last) else ""
        end_text = f"stopped after {steps}; resume=True goes on" if self.stopped else steps
        return f"TrainingResult({self.output}: {end_text}{loss})"

    def _repr_html_(self) -> str:
        progress = self.progress
        peak_text, planned_text = map(size_text, (self.peak_nbytes, self.plan.planned_nbytes))
        summary_rows = [
            ("file", "not yet: the run was stopped" if self.stopped else str(self.output)),
            ("steps", f"{progress.step:,} of {self.plan.job.steps:,} in {clock(progress.seconds)}"),
            ("memory", f"{peak_text} of {planned_text} planned"),
        ]
        if math.isfinite(progress.last):
            base_text = f" (base {progress.base:.4f})" if math.isfinite(progress.base) else ""
            summary_rows.append(("validation loss", f"{progress.last:.4f}{base_text}"))
        result_html = html_table(summary_rows) + self.plot().html
        if not self.answers:
            return result_html
        answer_rows = [("held-out question", "data", "base", "tuned")]
        for a in self.answers:
            base_answer = f"{a.base} ({END_LABELS[a.base_ended]})"
            tuned_answer = f"{a.tuned} ({END_LABELS[a.tuned_ended]})"
            answer_rows.append((a.question, a.reference, base_answer, tuned_answer))
        return result_html + html_table(answer_rows)
