"""Plans bound to memory: steps of training and of evaluation on one session. It knows no files and no schedule."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from packtrain.distributed import ALONE, World, here
from packtrain.engine.executor import Executor, Session
from packtrain.engine.optim import ROUNDING, Optimizer
from packtrain.models.lora import KEY
from packtrain.models.preference_loss import PAIRS, Preference
from packtrain.planner.training_plans import (
    APPLY,
    EVALUATE,
    MEASURE,
    MICRO,
    STEP,
    UPDATE,
    Name,
    Plans,
)
from packtrain.training.checkpoint_shards import overlays
from packtrain.training.gradient_sums import Exchanged, exchanged
from packtrain.training.pair_batches import logps_of, measured, right, summary

T = TypeVar("T")
Batch = Mapping[str, np.ndarray]
Counts = tuple[int, int]
Sums = tuple[list[float], list[float], float, Counts]
IN_A_ROW = 3  # bad steps that end a run


class NotFinite(ArithmeticError):
    """Several steps in a row had no finite loss or gradient; names the op that produced the first such value."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """Result of a step: mean loss of its tokens, gradient norm before clipping; `bad` is why it was skipped.

    note  what the optimizer reports
    more  of a loss of pairs: what `pair_batches.summary` says
    """

    loss: float
    norm: float
    tokens: int
    bad: str | None
    note: str = ""
    more: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Mean loss of `tokens` tokens, and the standard error of that mean over windows.

    accuracy  share of them that were the likeliest token, NaN if unknown
    ends      of tokens that end an answer: how many were the likeliest token, and how many there were
    Of a loss of pairs all of it is of pairs: `accuracy` is the share in which the chosen answer has the higher reward.
    """

    loss: float
    error: float
    tokens: int
    accuracy: float = math.nan
    ends: Counts = (0, 0)

    @property
    def accuracy_error(self) -> float:
        """Standard error of the accuracy."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / max(self.tokens - 1, 1))


class Turn:
    """One step of the engine, which an optimizer drives, see `optim.optimizer.Turn`.

    sums  of several ranks, which make the loss and the gradients of this rank the sums of all
    """

    def __init__(
        self,
        run: Mapping[Name, Executor],
        shares: Sequence[Batch],
        rounding: Batch,
        before: "Turn | None" = None,
        sums: Exchanged | None = None,
    ) -> None:
        self.run, self.shares, self.rounding, self.sums = run, shares, rounding, sums
        self.loss = np.zeros((), np.float32)
        self.fed: list[tuple[Executor, Batch]] = []
        # on all ranks, or they would not meet in the next exchange
        is_same_data = before is not None and all(here().gather(_same(before.shares, shares)))
        self.last: Batch | None = {"loss": before.loss} if before and is_same_data else None
        self.evaluations, self.note = 0, ""
        # of the first evaluation, and of the latest one
        self.latest: list[Batch] = before.latest if before and is_same_data else []
        self.outputs = self.latest

    def whole(self, hyper: Batch) -> Batch:
        if STEP in self.run:
            return self._fed(STEP, [{**self.shares[0], **hyper, **self.rounding}])[0]
        if MEASURE not in self.run:
            return {**self.evaluate(), **self.update(hyper)}
        (measured_outputs,) = self._fed(MEASURE, self.shares)
        numbers = {**hyper, **self.rounding, "squares": measured_outputs["squares"]}
        self.run[APPLY]({**self.shares[0], **numbers})
        return measured_outputs

    def evaluate(self) -> Batch:
        fresh = (np.array(float(i == 0), np.float32) for i in range(len(self.shares)))
        inputs = [{**s, "fresh": new} for s, new in zip(self.shares, fresh, strict=True)]
        losses = [output["loss"] for output in self._fed(MICRO, inputs)]
        self.loss = np.array(sum(losses), np.float32)
        if self.sums is not None:
            self.sums.end(self.loss)
        return {"loss": self.loss}

    def update(self, hyper: Batch) -> Batch:
        run, values = self.run[UPDATE], {**hyper, **self.rounding, "loss": self.loss}
        updated = run({name: values[name] for name in values.keys() & run.inputs.keys()})
        if self.sums is not None:
            self.sums.spread()
        return updated

    def say(self, note: str) -> None:
        self.note = note

    def _fed(self, name: str, inputs: Sequence[Batch]) -> list[Batch]:
        self.fed = [(self.run[name], batch) for batch in inputs]
        leaving = None
        if self.sums is not None and name == MICRO:
            leaving = self.sums.leaving()
        *earlier, last = self.fed
        self.latest = [run(batch) for run, batch in earlier]
        self.latest.append(last[0](last[1], stop=leaving))
        self.outputs = self.outputs or self.latest
        self.evaluations += 1
        return self.latest

    def diagnose(self) -> str | None:
        """The op that first computes a non-finite value when the last evaluation is repeated, or None."""
        diagnoses = (run.diagnose(inputs) for run, inputs in self.fed)
        return next(filter(None, diagnoses), None)


class Engine:
    """The session of a run with an executor for each of its plans.

    shared  frozen leaves that are read in place
    seed    of dropout and stochastic rounding
    bad     steps in a row whose loss or gradient was not finite
    since   the step after which the optimizer began: it counts its own steps
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
        self.session.overlay(overlays(plans))
        self.bad, self.since = 0, 0
        self.before: Turn | None = None  # the last step, if its gradients are still there
        self.run = self.session.executors(plans.placed, plans.plans)
        self.sums = exchanged(self.session, plans, self.run.get(MICRO))

    def step(self, batches: Sequence[Batch], number: int, rate: float) -> Stepped:
        """Train on the micro-batches of step `number`, counted from 1. Raises NotFinite for IN_A_ROW bad steps."""
        tokens = here().total(float(sum(batch["weights"].sum() for batch in batches)))
        shares = self._shares(batches, tokens, number)
        turn = Turn(self.run, shares, self._rounding(number), self.before, self.sums)
        if self.sums is not None:
            self.sums.begin()
        self.before = None
        result = self.optimizer.drive(turn, number - self.since, rate)
        self.before = turn if self.optimizer.evaluations > 1 else None
        self.bad, bad = judged(result, turn, self.bad)
        norm, preference = float(result["squares"]) ** 0.5, self.plans.shape.preference
        extra_metrics = {}
        if preference:
            all_pairs = here().gather([*self._pairs(preference, batches, turn)])
            extra_metrics = summary(chain.from_iterable(all_pairs))
        if self.sums is not None:
            extra_metrics = {**extra_metrics, **self.sums.seconds()}
        return Stepped(float(result["loss"]), norm, int(tokens), bad, turn.note, extra_metrics)

    def _pairs(
        self, preference: Preference, batches: Sequence[Batch], turn: Turn
    ) -> Iterator[dict[str, np.ndarray]]:
        """What the step measured of its pairs."""
        logps = np.concatenate([output["logps"] for output in turn.outputs])
        for batch in batches:
            rows = len(batch[PAIRS])
            yield measured(preference, logps[:rows], batch)
            logps = logps[rows:]

    def _shares(self, batches: Sequence[Batch], tokens: float, number: int) -> list[Batch]:
        """The inputs of each run of a graph, with weights that add up to 1 over the step."""
        if self.plans.shape.preference:
            local_pairs = float(sum(batch[PAIRS].sum() for batch in batches))
            count = np.float32(here().total(local_pairs) or 1)
            shares = [{**b, **with_targets(b), PAIRS: b[PAIRS] / count} for b in batches]
            shares = [{n: v for n, v in share.items() if n != "weights"} for share in shares]
        else:
            token_count = np.float32(tokens or 1)
            shares = [
                {**b, **with_targets(b), "weights": b["weights"] / token_count} for b in batches
            ]
        if self.plans.shape.layered:
            shares = [{name: np.concatenate([s[name] for s in shares]) for name in shares[0]}]
        lora = self.plans.shape.config.lora
        if lora is not None and lora.dropout:
            first = ((number - 1) * here().size + here().rank) * len(shares)
            numbers = range(first, first + len(shares))
            keys = (np.array([self.seed, n], np.int64) for n in numbers)
            shares = [{**share, KEY: key} for share, key in zip(shares, keys, strict=True)]
        return [*shares]

    def _rounding(self, number: int) -> Batch:
        """Seed and step, if weights are rounded stochastically."""
        is_stochastic = any(ROUNDING in run.inputs for run in self.run.values())
        return {ROUNDING: np.array([self.seed, number], np.int64)} if is_stochastic else {}

    def evaluate(self, batches: Iterable[Batch], eos_ids: Sequence[int] = ()) -> Evaluated:
        """See evaluate: of this engine's plan, with the batches shared out over all ranks."""
        return evaluate(self.run[EVALUATE], batches, self.plans.shape.preference, here(), eos_ids)


def _same(first: Sequence[Batch], second: Sequence[Batch]) -> bool:
    pairs = zip(first, second, strict=False)
    matches = (np.array_equal(a[name], b[name]) for a, b in pairs for name in b)
    return len(first) == len(second) and all(matches)


def judged(result: Batch, turn: Turn, num_bad: int) -> tuple[int, str | None]:
    """Bad steps in a row, of which there were so many `num_bad`; and the op, tensor and source line that made this one
    bad, or None.

    The gate in the graph has already skipped the update. With clipping by global norm, the bad step changed nothing,
    and repeating it gives the same values; without, it may have changed tensors before the first bad gradient, and the
    repetition can differ. Raises NotFinite for IN_A_ROW bad steps.
    """
    if np.isfinite(result["loss"]) and np.isfinite(result["squares"]):
        return 0, None
    diagnosis = turn.diagnose() or "it is finite when run again"
    if num_bad + 1 == IN_A_ROW:
        raise NotFinite(
            f"{IN_A_ROW} steps in a row without a finite loss and gradient; {diagnosis}"
        )
    return num_bad + 1, diagnosis


def with_targets(batch: Batch) -> Batch:
    """The targets of a batch, none where the weight is 0: the head then leaves the position out."""
    return {"targets": np.where(batch["weights"] > 0, batch["targets"], np.int32(-1))}


def evaluate(
    run: Executor,
    batches: Iterable[Batch],
    preference: Preference | None = None,
    world: World = ALONE,
    eos_ids: Sequence[int] = (),
) -> Evaluated:
    """Mean loss over batches by a plan with the outputs `losses` and perhaps `right`, of tokens with `weights`.

    Ids in `eos_ids` are also counted by themselves. The ranks of the world take batches in turn; the result
    has the same
    bits as that of one.
    """
    if preference is not None:
        return _evaluate_pairs(run, batches, preference, world)
    results: list[Any] = _in_turn(batches, world, lambda batch: _evaluated(run, batch, eos_ids))
    total, weight = (np.array([x for result in results for x in result[part]]) for part in (0, 1))
    hits = sum(result[2] for result in results)
    used = weight > 0
    total, weight, count = total[used], weight[used], int(used.sum())
    mean = float(total.sum() / weight.sum())
    spread = float(np.square(total - mean * weight).sum()) * count / max(count - 1, 1)
    tokens = float(weight.sum())
    right_ends, all_ends = (sum(result[3][part] for result in results) for part in (0, 1))
    eos_counts = (right_ends, all_ends)
    return Evaluated(mean, spread**0.5 / tokens, int(tokens), hits / tokens, eos_counts)


def _in_turn(batches: Iterable[Batch], world: World, of: Callable[[Batch], T]) -> list[T]:
    """What `of` says of each batch, in their order."""
    local_results = [of(batch) for i, batch in enumerate(batches) if i % world.size == world.rank]
    rounds = zip_longest(*world.gather(local_results))
    return [result for turn in rounds for result in turn if result is not None]


def _evaluated(run: Executor, batch: Batch, eos_ids: Sequence[int]) -> Sums:
    """Of each row the sum of its losses and its weight; the weight of tokens that were the likeliest; and counts, as
    Evaluated.ends."""
    outputs, weights = run({**batch, **with_targets(batch)}), batch["weights"]
    losses = outputs["losses"].astype(np.float64)
    hits = outputs.get("right", np.float64(math.nan))
    right = float((hits * weights).sum(dtype=np.float64))
    last = np.isin(batch["targets"], eos_ids) & (weights > 0)
    eos_counts = (int(np.sum(hits * last)), int(last.sum())) if "right" in outputs else (0, 0)
    sums, weight = (losses * weights).sum(-1), weights.sum(-1, dtype=np.float64)
    return sums.tolist(), weight.tolist(), right, eos_counts


def _evaluate_pairs(
    run: Executor, batches: Iterable[Batch], preference: Preference, world: World
) -> Evaluated:
    def of(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        inputs = {**batch, **with_targets(batch)}
        outputs = run({name: inputs[name] for name in run.inputs})
        measures = measured(preference, logps_of(outputs["losses"], batch), batch)
        return measures["loss"], measures["chosen"] - measures["rejected"]

    losses, margins = zip(*_in_turn(batches, world, of), strict=True)
    all_losses, hits = np.concatenate(losses), right(np.concatenate(margins))
    count = len(all_losses)
    error = float(all_losses.std()) / math.sqrt(max(count - 1, 1))
    return Evaluated(float(all_losses.mean()), error, count, float(hits.mean()))
