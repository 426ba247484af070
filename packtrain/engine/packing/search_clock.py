"""When to stop."""

import time
from collections.abc import Callable


class Clock:
    """Says whether a number of seconds is over; with None they never are. `now` is the time, in seconds."""

    def __init__(self, seconds: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.end = float("inf") if seconds is None else now() + seconds

    @property
    def limited(self) -> bool:
        return self.end < float("inf")

    @property
    def left(self) -> float:
        return self.end - self.now()

    @property
    def over(self) -> bool:
        return self.limited and self.left <= 0
