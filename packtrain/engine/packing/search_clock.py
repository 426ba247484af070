"""A clock that says when a search must stop."""

import time
from collections.abc import Callable


class SearchClock:
    """Says whether a number of seconds is over; None is never over. `now` returns the time in seconds."""

    def __init__(self, seconds: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.end_seconds = float("inf") if seconds is None else now() + seconds

    @property
    def is_limited(self) -> bool:
        return self.end_seconds < float("inf")

    @property
    def left(self) -> float:
        return self.end_seconds - self.now()

    @property
    def is_over(self) -> bool:
        return self.is_limited and self.left <= 0
