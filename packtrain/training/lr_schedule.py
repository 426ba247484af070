"""Learning-rate schedules: the rate of a step, from its number alone."""

import math
from dataclasses import dataclass

from packtrain.common.errors import InputError

LR_SCHEDULES = ("cosine", "linear", "halving", "constant")


@dataclass(frozen=True, slots=True)
class LrSchedule:
    """Warm-up from `start_lr` to `lr`, then decay to `lr_min` until the last step.

    decay          cosine (Loshchilov & Hutter 2017, arXiv 1608.03983), linear, halving, or constant
    warmup_steps   steps of warm-up
    num_cycles     parts of the decay, each from `lr`, `cycle_growth` times as long as the one before; not for halving
    halving_steps  halving: steps until the rate is halved
    """

    decay: str
    lr: float
    lr_min: float
    warmup_steps: int
    steps: int
    num_cycles: int = 1
    cycle_growth: float = 1.0
    start_lr: float = 0.0
    halving_steps: int = 1

    def __post_init__(self) -> None:
        for flag, rate in (("--lr-min", self.lr_min), ("--warmup-lr", self.start_lr)):
            if rate > self.lr:
                fact = f"{flag} {rate:g} is more than the peak, --lr {self.lr:g}; it must be less"
                raise InputError(fact)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        if step <= self.warmup_steps:
            return self.start_lr + (self.lr - self.start_lr) * step / self.warmup_steps
        decay_step = step - self.warmup_steps - 1
        if self.decay == "constant":
            return self.lr
        if self.decay == "halving":
            return max(math.ldexp(self.lr, -(decay_step // self.halving_steps)), self.lr_min)
        part = self._cycle_share(decay_step / max(self.steps - self.warmup_steps - 1, 1))
        decay_factor = 1 - part if self.decay == "linear" else (1 + math.cos(math.pi * part)) / 2
        return self.lr_min + (self.lr - self.lr_min) * max(decay_factor, 0.0)

    def _cycle_share(self, decay_share: float) -> float:
        """Return the share done of the current cycle when `decay_share` of the whole decay is done; both are 0 to 1."""
        cycle_lengths = [self.cycle_growth**i for i in range(self.num_cycles)]
        remaining_share = decay_share * sum(cycle_lengths)
        while remaining_share >= cycle_lengths[0] and len(cycle_lengths) > 1:
            remaining_share -= cycle_lengths.pop(0)
        return remaining_share / cycle_lengths[0]


def steps_per_eval(requested: int | None, steps: int) -> int:
    """Return the number of steps between validations: `requested`, or about an eighth of all `steps`, from 5 to 200."""
    return min(max(-(-steps // 8), 5), 200) if requested is None else requested
