"""Learning-rate schedules: the rate of a step, from its number alone."""

import math
from dataclasses import dataclass

from packtrain.common.errors import InputError

KINDS = ("cosine", "linear", "halving", "constant")


@dataclass(frozen=True, slots=True)
class Schedule:
    """Warm-up from `start` to `lr`, then decay to `lr_min` until the last step.

    kind    cosine (Loshchilov & Hutter 2017, arXiv 1608.03983), linear, halving, or constant
    warmup  steps of warm-up
    cycles  parts of the decay, each from `lr`, and each `growth` times as long as the one before; not for halving
    every   halving: steps at one rate, before half of it
    """

    kind: str
    lr: float
    lr_min: float
    warmup: int
    steps: int
    cycles: int = 1
    growth: float = 1.0
    start: float = 0.0
    every: int = 1

    def __post_init__(self) -> None:
        for flag, rate in (("--lr-min", self.lr_min), ("--warmup-lr", self.start)):
            if rate > self.lr:
                raise InputError(
                    f"{flag} {rate:g} is more than the peak, --lr {self.lr:g}; it must be less"
                )

    def rate(self, step: int) -> float:
        """The rate of a step, counted from 1."""
        if step <= self.warmup:
            return self.start + (self.lr - self.start) * step / self.warmup
        decay_step = step - self.warmup - 1
        if self.kind == "constant":
            return self.lr
        if self.kind == "halving":
            return max(math.ldexp(self.lr, -(decay_step // self.every)), self.lr_min)
        part = self._part(decay_step / max(self.steps - self.warmup - 1, 1))
        left = 1 - part if self.kind == "linear" else (1 + math.cos(math.pi * part)) / 2
        return self.lr_min + (self.lr - self.lr_min) * max(left, 0.0)

    def _part(self, done: float) -> float:
        """How much of its cycle is done where this much of the decay is."""
        lengths = [self.growth**i for i in range(self.cycles)]
        left = done * sum(lengths)
        while left >= lengths[0] and len(lengths) > 1:
            left -= lengths.pop(0)
        return left / lengths[0]


def steps_per_eval(requested: int | None, steps: int) -> int:
    """Steps between two validations: as asked, or about eight in a run, from 5 to 200 steps apart."""
    return min(max(-(-steps // 8), 5), 200) if requested is None else requested
