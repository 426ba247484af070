"""The result of a training run, and how a notebook shows it."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packtrain.common.text import clock, plural
from packtrain.engine.memory_plan import size_text
from packtrain.training.checkpoints import Progress
from packtrain.training.monitoring import METRICS
from packtrain.training.monitoring.curve import Curve
from packtrain.training.monitoring.metrics_file import read
from packtrain.training.monitoring.notebook import Html, table, to_frame
from packtrain.workflows.behaviour_check import ENDINGS, CheckedAnswer, read_answers
from packtrain.workflows.planned_run import Ready


@dataclass(frozen=True, slots=True, repr=False)
class Trained:
    """The result of a run.

    output         the model, a GGUF file; not written yet if `stopped`
    folder         checkpoints, metrics.jsonl, loss.svg, plan.html
    plan           the plan; compare `plan.planned_nbytes` with the measured `peak_nbytes`
    progress       steps, tokens, seconds, validation losses
    stopped        whether it was asked to stop; the same call with resume=True continues
    """

    output: Path
    folder: Path
    plan: Ready
    progress: Progress
    peak_nbytes: int
    stopped: bool

    @property
    def ends(self) -> tuple[int, int]:
        """Of the result's validation on conversations: in how many answers the token that ends them was the likeliest,
        and in how many not cut off; (0, 0) if unknown, as with mask_prompt=False."""
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
        return [r for r in read(self.folder / METRICS) if "loss" in r]

    def to_frame(self) -> Any:
        """The history as a pandas DataFrame. Raises InputError without pandas."""
        return to_frame(self.history)

    def plot(self) -> Html:
        """Training and validation loss over steps, as a notebook shows it."""
        curve = Curve()
        for record in self.history:
            curve.add(record)
        return Html(curve.svg())

    def __repr__(self) -> str:
        steps, p = plural(self.progress.step, "step"), self.progress
        loss = f"; validation loss {p.last:.4f}" if math.isfinite(p.last) else ""
        end = f"stopped after {steps}; resume=True goes on" if self.stopped else steps
        return f"Trained({self.output}: {end}{loss})"

    def _repr_html_(self) -> str:
        p = self.progress
        rows = [
            ("file", "not yet: the run was stopped" if self.stopped else str(self.output)),
            ("steps", f"{p.step:,} of {self.plan.job.steps:,} in {clock(p.seconds)}"),
            (
                "memory",
                f"{size_text(self.peak_nbytes)} of {size_text(self.plan.planned_nbytes)} planned",
            ),
        ]
        if math.isfinite(p.last):
            before = f" (base {p.base:.4f})" if math.isfinite(p.base) else ""
            rows.append(("validation loss", f"{p.last:.4f}{before}"))
        shown = table(rows) + self.plot().html
        if not self.answers:
            return shown
        compared = [("held-out question", "data", "base", "tuned")]
        for a in self.answers:
            base = f"{a.base} ({ENDINGS[a.base_ended]})"
            tuned = f"{a.tuned} ({ENDINGS[a.tuned_ended]})"
            compared.append((a.question, a.reference, base, tuned))
        return shown + table(compared)
