"""How far something is that is done part by part, beside the steps of a run: merging, or a validation."""

import time
from contextlib import suppress
from types import TracebackType
from typing import TextIO

from packtrain.watch.progress import Bar, clock, redraws

SECONDS = 10.0  # between lines, where there is no terminal


class Count:
    """`with Count(stream, "merging", "block") as count:` shows `count(3, 18)`: merging: block 3 of 18, 0:40 left."""

    def __init__(self, stream: TextIO, what: str, part: str) -> None:
        self.stream, self.what, self.part = stream, what, part
        self.bar: Bar | None = None
        self.began = self.told = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """So many of all parts are done."""
        now = time.monotonic()
        left = clock((now - self.began) / max(done, 1) * (total - done))
        text = f"{self.what}: {self.part} {done} of {total}, {left} left"
        with suppress(OSError):  # nobody may be reading any more
            if redraws(self.stream):
                self.bar = self.bar or Bar(self.stream, total)
                self.bar.draw(done, text)
            elif now - self.told >= SECONDS and done < total:
                self.told = now
                print(text, file=self.stream, flush=True)

    def __enter__(self) -> "Count":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            with suppress(OSError):
                self.bar.close()
