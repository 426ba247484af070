"""Plans bound to memory: steps of training and of evaluation on one session. It knows no files and no schedule."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np

from packtrain.models.lora import KEY
from packtrain.run import Executor, Session
from packtrain.train.finite import FiniteGuard
from packtrain.train.optim import ROUNDING, Optimizer
from packtrain.train.plans import APPLY, EVALUATE, MEASURE, MICRO, STEP, UPDATE, Plans

Batch = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a step did: mean loss of its tokens, norm of the gradient before clipping; `bad` says why it was skipped."""

    loss: float
    norm: float
    tokens: int
    bad: str | None


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Mean loss of `tokens` tokens, and the standard error of that mean over windows."""

    loss: float
    error: float
    tokens: int


class Engine:
    """The session of a run with an executor for each of its plans.

    shared  leaves that are read where they are, and never change
    seed    of dropout, and of the rounding of bf16 weights
    """

    def __init__(
        self,
        plans: Plans,
        optimizer: Optimizer,
        shared: Mapping[str, np.ndarray] = MappingProxyType({}),
        seed: int = 0,
    ) -> None:
        self.plans, self.optimizer, self.seed = plans, optimizer, seed
        self.session = Session()
        self.session.share(shared)
        self.guard = FiniteGuard()
        self.run = {
            name: self.session.executor(placed, plans.plans[name])
            for name, placed in plans.placed.items()
        }

    def step(self, batches: Sequence[Batch], number: int, rate: float) -> Stepped:
        """Train on the micro-batches of step `number`, counted from 1. Raises NotFinite, see FiniteGuard."""
        tokens = float(sum(batch["weights"].sum() for batch in batches))
        hyper = self.optimizer.inputs(number, rate)
        if any(ROUNDING in run.inputs for run in self.run.values()):
            hyper |= {ROUNDING: np.array([self.seed, number], np.int64)}
        shares = [{**b, "weights": b["weights"] / np.float32(tokens or 1)} for b in batches]
        if self.plans.shape.layered:
            shares = [{name: np.concatenate([s[name] for s in shares]) for name in shares[0]}]
        lora = self.plans.shape.config.lora
        if lora is not None and lora.dropout:
            numbers = range((number - 1) * len(shares), number * len(shares))
            keys = (np.array([self.seed, n], np.int64) for n in numbers)
            shares = [{**share, KEY: key} for share, key in zip(shares, keys, strict=True)]
        if STEP in self.run:
            inputs = shares[0] | hyper
            got = self.run[STEP](inputs)
            bad = self.guard.check(got, partial(self.run[STEP].diagnose, inputs))
        elif MEASURE in self.run:
            got = self.run[MEASURE](shares[0])
            self.run[APPLY](shares[0] | hyper | {"squares": got["squares"]})
            bad = self.guard.check(got, partial(self.run[MEASURE].diagnose, shares[0]))
        else:
            got, bad = self._accumulated(shares, hyper)
        return Stepped(float(got["loss"]), float(got["squares"]) ** 0.5, int(tokens), bad)

    def _accumulated(
        self, shares: Sequence[dict[str, np.ndarray]], hyper: Batch
    ) -> tuple[dict[str, np.ndarray], str | None]:
        inputs = [
            share | {"fresh": np.array(float(i == 0), np.float32)} for i, share in enumerate(shares)
        ]
        loss = np.array(sum(self.run[MICRO](one)["loss"] for one in inputs), np.float32)
        got = {"loss": loss} | self.run[UPDATE]({**hyper, "loss": loss})

        def diagnose() -> str | None:
            return next(filter(None, map(self.run[MICRO].diagnose, inputs)), None)

        return got, self.guard.check(got, diagnose)

    def evaluate(self, batches: Iterable[Batch]) -> Evaluated:
        return evaluate(self.run[EVALUATE], batches)


def evaluate(run: Executor, batches: Iterable[Batch]) -> Evaluated:
    """Mean loss over batches by a plan with the output `losses`; tokens count by their `weights`."""
    sums, counts = list[float](), list[float]()
    for batch in batches:
        losses = run(batch)["losses"].astype(np.float64)
        sums += (losses * batch["weights"]).sum(-1).tolist()
        counts += batch["weights"].sum(-1, dtype=np.float64).tolist()
    total, weight = np.array(sums), np.array(counts)
    used = weight > 0
    total, weight, count = total[used], weight[used], int(used.sum())
    mean = float(total.sum() / weight.sum())
    spread = float(np.square(total - mean * weight).sum()) * count / max(count - 1, 1)
    return Evaluated(mean, spread**0.5 / float(weight.sum()), int(weight.sum()))
