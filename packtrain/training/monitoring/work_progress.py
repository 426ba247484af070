"""Progress of work other than training steps: merging, validation, evaluation."""

import time
from typing import TextIO

from packtrain.common.text import clock
from packtrain.training.monitoring.progress import MakeBar, Work


class Count(Work):
    """`with Count(stream, "merging", "block") as count:` shows `count(3, 18)`: merging: block 3 of 18, 0:40 left."""

    def __init__(
        self, stream: TextIO, what: str, part: str, make_bar: MakeBar | None = None
    ) -> None:
        super().__init__(stream, make_bar)
        self.what, self.part = what, part
        self.began = time.monotonic()

    def __call__(self, done: int, total: int, *texts: str) -> None:
        """`done` of `total` parts are done; the texts show results so far."""
        left = clock((time.monotonic() - self.began) / max(done, 1) * (total - done))
        if done < total or self.redraws:  # the next message shows that it has ended
            self.tell(
                done, total, f"{self.what}: {self.part} {done} of {total}, {left} left", *texts
            )
