"""Progress of work other than training steps: merging, validation, evaluation."""

import time
from typing import TextIO

from packtrain.common.text import clock
from packtrain.training.monitoring.progress import MakeBar, WorkProgress


class WorkCounter(WorkProgress):
    """`with WorkCounter(stream, "merging", "block") as count:` shows `count(3, 18)` as block 3 of 18, 0:40 left."""

    def __init__(
        self, stream: TextIO, label: str, unit: str, make_bar: MakeBar | None = None
    ) -> None:
        super().__init__(stream, make_bar)
        self.label, self.unit = label, unit
        self.start_time = time.monotonic()

    def __call__(self, done: int, total: int, *texts: str) -> None:
        """Report that `done` of `total` parts are done; the texts show results so far."""
        left = clock((time.monotonic() - self.start_time) / max(done, 1) * (total - done))
        if done < total or self.can_redraw:  # the next message shows that it has ended
            self.report_progress(
                done, total, f"{self.label}: {self.unit} {done} of {total}, {left} left", *texts
            )
