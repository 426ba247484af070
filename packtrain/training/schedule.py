"""Learning-rate schedules: the rate of a step, from its number alone."""

import math
from dataclasses import dataclass

KINDS = ("cosine", "linear", "constant")


@dataclass(frozen=True, slots=True)
class Schedule:
    """Warm-up from 0 to `lr`, then decay to `lr_min` until the last step, in `cycles` equal parts, each from `lr`.

    kind    cosine (Loshchilov & Hutter 2017, arXiv 1608.03983), linear, or constant
    warmup  steps of warm-up
    """

    kind: str
    lr: float
    lr_min: float
    warmup: int
    steps: int
    cycles: int = 1

    def rate(self, step: int) -> float:
        """The rate of a step, counted from 1."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        if self.kind == "constant":
            return self.lr
        done = (step - self.warmup - 1) / max(self.steps - self.warmup - 1, 1) * self.cycles
        part = done - min(math.floor(done), self.cycles - 1)
        left = 1 - part if self.kind == "linear" else (1 + math.cos(math.pi * part)) / 2
        return self.lr_min + (self.lr - self.lr_min) * max(left, 0.0)
