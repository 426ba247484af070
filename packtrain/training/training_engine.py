"""Plans bound to memory: steps of training and of evaluation on one session. It knows no files and no schedule."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from packtrain.distributed import SINGLE_PROCESS, World, current_world
from packtrain.engine.executor import Executor, Session
from packtrain.engine.memory_plan import Plan
from packtrain.engine.optim import ROUNDING, Optimizer
from packtrain.models.lora import KEY
from packtrain.models.preference_loss import PAIRS, PreferenceLoss
from packtrain.planner import training_plans
from packtrain.planner.training_plans import EVALUATE, MEASURE, MICRO, STEP, UPDATE, TrainingPlans
from packtrain.training.checkpoint_shards import shard_offsets
from packtrain.training.gradient_sums import GradientExchange
from packtrain.training.pair_batches import answer_logps, chosen_wins, pair_measures, pair_summary

T = TypeVar("T")
Batch = Mapping[str, np.ndarray]
EogCounts = tuple[int, int]
BatchSums = tuple[list[float], list[float], float, EogCounts]
MAX_BAD_STEPS = 3  # bad steps in a row that end a run


class NotFinite(ArithmeticError):
    """Several steps in a row had no finite loss or gradient; names the op that produced the first such value."""


@dataclass(frozen=True, slots=True)
class TrainStepResult:
    """Result of a step: mean loss of its tokens, gradient norm before clipping; `skip_reason` is why it was skipped.

    note           what the optimizer reports
    extra_metrics  `pair_batches.pair_summary` of a loss of pairs, and seconds of exchange between ranks
    """

    loss: float
    norm: float
    tokens: int
    skip_reason: str | None
    note: str = ""
    extra_metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """Mean loss of `tokens` tokens, and the standard error of that mean over windows, NaN for a single one.

    accuracy    share of them that were the likeliest token, NaN if unknown
    eog_counts  of tokens that end an answer: how many were the likeliest token, and how many there were
    A loss of pairs counts pairs instead: `accuracy` is the share in which the chosen answer has the higher reward.
    """

    loss: float
    error: float
    tokens: int
    accuracy: float = math.nan
    eog_counts: EogCounts = (0, 0)

    @property
    def accuracy_error(self) -> float:
        """Standard error of the accuracy."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / max(self.tokens - 1, 1))


class EngineStep:
    """One step on its data, which an optimizer runs by `evaluate` and `update`, once or repeatedly (L-BFGS).

    sums  exchange of several ranks, which turns this rank's loss and gradients into the sums of all ranks
    """

    def __init__(
        self, run: Mapping[training_plans.Name, Executor], batch_shares: Sequence[Batch], rounding: Batch,
        before: "EngineStep | None" = None, sums: GradientExchange | None = None,
    ) -> None:  # fmt: skip
        self.run, self.batch_shares, self.rounding, self.sums = run, batch_shares, rounding, sums
        self.loss = np.zeros((), np.float32)
        self.fed_batches: list[tuple[Executor, Batch]] = []
        # on all ranks, or they would not meet in the next exchange
        is_same_data = before is not None and all(
            current_world().gather(_are_equal_batches(before.batch_shares, batch_shares))
        )
        self.last: Batch | None = {"loss": before.loss} if before and is_same_data else None
        self.evaluations, self.note = 0, ""
        # outputs of the latest evaluation, and of the first one
        self.latest_outputs: list[Batch] = before.latest_outputs if before and is_same_data else []
        self.outputs = self.latest_outputs

    def evaluate_and_update(self, hyper: Batch) -> Batch:
        """Evaluate the batch and update the weights; `hyper`: the optimizer's numbers for this step by input name, such
        as its learning rate. Returns `loss` and `squares`, the squared norm of the gradient."""
        if STEP in self.run:
            return self._run_graph(STEP, [{**self.batch_shares[0], **hyper, **self.rounding}])[0]
        if MEASURE not in self.run:
            return {**self.evaluate(), **self.update(hyper)}
        (measured_outputs,) = self._run_graph(MEASURE, self.batch_shares)
        numbers = {**hyper, **self.rounding, "squares": measured_outputs["squares"]}
        self.run[training_plans.APPLY]({**self.batch_shares[0], **numbers})
        return measured_outputs

    def evaluate(self) -> Batch:
        """Sum the gradients of all micro-batches and ranks, without an update; returns `loss`, summed as well."""
        inputs = [{**s, "fresh": np.array(i == 0, "f4")} for i, s in enumerate(self.batch_shares)]
        losses = [output["loss"] for output in self._run_graph(MICRO, inputs)]
        self.loss = np.array(sum(losses), np.float32)
        if self.sums is not None:
            self.sums.finish_step(self.loss)
        return {"loss": self.loss}

    def update(self, hyper: Batch) -> Batch:
        """Update by the gradients that `evaluate` summed, with numbers `hyper`; return the update graph's outputs."""
        executor, values = self.run[UPDATE], {**hyper, **self.rounding, "loss": self.loss}
        updated = executor({name: values[name] for name in values.keys() & executor.inputs.keys()})
        if self.sums is not None:
            self.sums.spread_weights()
        return updated

    def report(self, note: str) -> None:
        """Keep a note on the step, for its record."""
        self.note = note

    def _run_graph(self, name: str, inputs: Sequence[Batch]) -> list[Batch]:
        """Run the graph `name` on each of the inputs; the last micro-batch sends gradients to other ranks."""
        self.fed_batches = [(self.run[name], batch) for batch in inputs]
        sender = None
        if self.sums is not None and name == MICRO:
            sender = self.sums.make_sender()
        *earlier, last_batch = self.fed_batches
        self.latest_outputs = [executor(batch) for executor, batch in earlier]
        self.latest_outputs.append(last_batch[0](last_batch[1], stop=sender))
        self.outputs = self.outputs or self.latest_outputs
        self.evaluations += 1
        return self.latest_outputs

    def diagnose(self) -> str | None:
        """Repeat the last evaluation, and return the op that first computes a non-finite value; None if no op does."""
        diagnoses = (executor.diagnose(inputs) for executor, inputs in self.fed_batches)
        return next(filter(None, diagnoses), None)


class StepEngine:
    """An executor for each plan of a run on one session, and the steps that an optimizer drives on them.

    seed           from which dropout and stochastic rounding draw
    num_bad_steps  steps in a row whose loss or gradient was not finite
    before         the last step, whose gradients an optimizer of several evaluations may use; else None
    sums           exchange of several ranks
    """

    def __init__(
        self, session: Session, placed_graphs: training_plans.Graphs, plans: Mapping[training_plans.Name, Plan],
        seed: int,
    ) -> None:  # fmt: skip
        self.session, self.seed, self.num_bad_steps = session, seed, 0
        self.run = session.executors(placed_graphs, plans)
        self.before: EngineStep | None = None
        self.sums: GradientExchange | None = None

    def run_step(
        self, optimizer: Optimizer, batch_shares: Sequence[Batch], step_number: int, num_updates: int, lr: float
    ) -> tuple[EngineStep, Batch]:  # fmt: skip
        """Run a step, the optimizer's update number `num_updates`, on the inputs of each micro-batch; returns the step
        and its outputs `loss` and `squares` (squared gradient norm). The optimizer decides how often the graph runs."""
        is_stochastic = any(ROUNDING in executor.inputs for executor in self.run.values())
        rounding = {ROUNDING: np.array([self.seed, step_number], np.int64)} if is_stochastic else {}
        engine_step = EngineStep(self.run, batch_shares, rounding, self.before, self.sums)
        if self.sums is not None:
            self.sums.begin_step()
        self.before = None
        outputs = optimizer.drive(engine_step, num_updates, lr)
        self.before = engine_step if optimizer.evaluations > 1 else None
        return engine_step, outputs

    def diagnose(self, engine_step: EngineStep, outputs: Batch) -> str | None:
        """Return the op, tensor and source line of a bad step's first non-finite value; None if good. Counts bad steps.

        The gate in the graph has already skipped the update. With clipping by global norm, the bad step changed
        nothing, and repeating it gives the same values; without, it may have changed tensors before the first bad
        gradient, and the repetition can differ. Raises NotFinite after MAX_BAD_STEPS bad steps.
        """
        if np.isfinite(outputs["loss"]) and np.isfinite(outputs["squares"]):
            self.num_bad_steps = 0
            return None
        diagnosis = engine_step.diagnose() or "it is finite when run again"
        if self.num_bad_steps + 1 == MAX_BAD_STEPS:
            fact = f"{MAX_BAD_STEPS} steps in a row without a finite loss and gradient"
            raise NotFinite(f"{fact}; {diagnosis}")
        self.num_bad_steps += 1
        return diagnosis


class TrainingEngine(StepEngine):
    """The session of a run with an executor for each of its plans.

    shared           frozen leaves that are read in place
    optimizer_start  the step after which the optimizer began: it counts its own steps
    """

    def __init__(
        self, plans: TrainingPlans, optimizer: Optimizer, shared: Mapping[str, np.ndarray] = MappingProxyType({}),
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.plans, self.optimizer, self.optimizer_start = plans, optimizer, 0
        session = Session()
        session.share(shared)
        session.overlay(shard_offsets(plans))
        super().__init__(session, plans.placed_graphs, plans.plans, seed)
        if MICRO in self.run and current_world().world_size > 1:
            self.sums = GradientExchange(session, plans, self.run[MICRO])

    def step(self, batches: Sequence[Batch], step_number: int, lr: float) -> TrainStepResult:
        """Train on the micro-batches of a step, counted from 1. Raises NotFinite after MAX_BAD_STEPS bad steps."""
        weights = [batch["weights"] for batch in batches]  # a text for replay counts more than once
        local_sums = float(sum(w.sum() for w in weights)), sum(map(np.count_nonzero, weights))
        total_weight, num_tokens = np.array(current_world().gather(local_sums)).sum(0).tolist()
        shares = self._shares(batches, total_weight, step_number)
        num_updates = step_number - self.optimizer_start
        step, result = self.run_step(self.optimizer, shares, step_number, num_updates, lr)
        skip_reason = self.diagnose(step, result)
        loss, norm = float(result["loss"]), float(result["squares"]) ** 0.5
        preference = self.plans.shape.preference
        extra_metrics = {}
        if preference:
            all_pairs = current_world().gather([*self._pair_measures(preference, batches, step)])
            extra_metrics = pair_summary(chain.from_iterable(all_pairs))
        if self.sums is not None:
            extra_metrics = {**extra_metrics, **self.sums.exchange_seconds()}
        return TrainStepResult(loss, norm, int(num_tokens), skip_reason, step.note, extra_metrics)

    def _pair_measures(
        self, preference: PreferenceLoss, batches: Sequence[Batch], engine_step: EngineStep
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yield the loss and rewards of each micro-batch's pairs, from the log-probabilities that the step returned."""
        logps = np.concatenate([output["logps"] for output in engine_step.outputs])
        for batch in batches:
            rows = len(batch[PAIRS])
            yield pair_measures(preference, logps[:rows], batch)
            logps = logps[rows:]

    def _shares(
        self, batches: Sequence[Batch], total_weight: float, step_number: int
    ) -> list[Batch]:
        """Return each micro-batch's inputs, weights divided by `total_weight`, the sum of weights on all ranks."""
        if self.plans.shape.preference:
            local_pairs = float(sum(batch[PAIRS].sum() for batch in batches))
            num_pairs = np.float32(current_world().total(local_pairs) or 1)
            shares = [{**b, **with_targets(b), PAIRS: b[PAIRS] / num_pairs} for b in batches]
            shares = [{n: v for n, v in share.items() if n != "weights"} for share in shares]
        else:
            total = np.float32(total_weight or 1)
            shares = [{**b, **with_targets(b), "weights": b["weights"] / total} for b in batches]
        lora = self.plans.shape.config.lora
        if lora is not None and lora.dropout:
            first, step = current_world().rank * len(shares), step_number - 1
            keys = [np.array([[self.seed, step, first + i]]) for i in range(len(shares))]
            shares = [{**share, KEY: key} for share, key in zip(shares, keys, strict=True)]
        if self.plans.shape.layered:
            shares = [{name: np.concatenate([s[name] for s in shares]) for name in shares[0]}]
        return [*shares]

    def evaluate(self, batches: Iterable[Batch], eog_ids: Sequence[int] = ()) -> ValidationResult:
        """Return the mean loss of batches, which ranks take in turn; targets in `eog_ids` are also counted apart."""
        preference = self.plans.shape.preference
        return evaluate(self.run[EVALUATE], batches, preference, current_world(), eog_ids)


def _are_equal_batches(batches: Sequence[Batch], other_batches: Sequence[Batch]) -> bool:
    batch_pairs = zip(batches, other_batches, strict=False)
    matches = (np.array_equal(a[name], b[name]) for a, b in batch_pairs for name in b)
    return len(batches) == len(other_batches) and all(matches)


def with_targets(batch: Batch) -> Batch:
    """Return the input `targets` of a batch, -1 where the weight is 0, so that the head leaves the position out."""
    return {"targets": np.where(batch["weights"] > 0, batch["targets"], np.int32(-1))}


def evaluate(
    run: Executor, batches: Iterable[Batch], preference: PreferenceLoss | None = None, world: World = SINGLE_PROCESS,
    eog_ids: Sequence[int] = (),
) -> ValidationResult:  # fmt: skip
    """Return the mean loss over weighted tokens of batches, by an executor with outputs `losses` and perhaps `right`;
    targets in `eog_ids` are also counted apart. Ranks take batches in turn; any number of ranks gives equal bits."""
    if preference is not None:
        return _evaluate_pairs(run, batches, preference, world)
    results: list[Any] = _share_out(batches, world, lambda batch: _batch_sums(run, batch, eog_ids))
    total, weight = (np.array([x for result in results for x in result[part]]) for part in (0, 1))
    num_hits = sum(result[2] for result in results)
    has_weight = weight > 0
    total, weight, num_rows = total[has_weight], weight[has_weight], int(has_weight.sum())
    mean, tokens = float(total.sum() / weight.sum()), float(weight.sum())
    spread = float(np.square(total - mean * weight).sum()) * num_rows / max(num_rows - 1, 1)
    error = spread**0.5 / tokens if num_rows > 1 else math.nan
    num_right_eog, num_eog = (sum(result[3][column] for result in results) for column in (0, 1))
    eog_counts = (num_right_eog, num_eog)
    return ValidationResult(mean, error, int(tokens), num_hits / tokens, eog_counts)


def _share_out(batches: Iterable[Batch], world: World, measure: Callable[[Batch], T]) -> list[T]:
    """Return `measure(batch)` of every batch, in order, to all ranks; each rank measures every world_size-th batch."""
    local_results = [
        measure(batch) for i, batch in enumerate(batches) if i % world.world_size == world.rank
    ]
    rounds = zip_longest(*world.gather(local_results))
    return [result for round_results in rounds for result in round_results if result is not None]


def _batch_sums(run: Executor, batch: Batch, eog_ids: Sequence[int]) -> BatchSums:
    """Run a batch; return each row's sums of losses and weights, the weight of right targets, and EOG counts."""
    outputs, weights = run({**batch, **with_targets(batch)}), batch["weights"]
    losses = outputs["losses"].astype(np.float64)
    hits = outputs.get("right", np.float64(math.nan))
    right_weight = float((hits * weights).sum(dtype=np.float64))
    is_eog = np.isin(batch["targets"], eog_ids) & (weights > 0)
    eog_counts = (int(np.sum(hits * is_eog)), int(is_eog.sum())) if "right" in outputs else (0, 0)
    row_sums, row_weights = (losses * weights).sum(-1), weights.sum(-1, dtype=np.float64)
    return row_sums.tolist(), row_weights.tolist(), right_weight, eog_counts


def _evaluate_pairs(
    run: Executor, batches: Iterable[Batch], preference: PreferenceLoss, world: World
) -> ValidationResult:
    """Return the mean loss over all pairs, and as accuracy the share of pairs whose chosen answer wins."""

    def measure(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        inputs = {**batch, **with_targets(batch)}
        outputs = run({name: inputs[name] for name in run.inputs})
        measures = pair_measures(preference, answer_logps(outputs["losses"], batch), batch)
        return measures["loss"], measures["chosen"] - measures["rejected"]

    losses, margins = zip(*_share_out(batches, world, measure), strict=True)
    all_losses, wins = np.concatenate(losses), chosen_wins(np.concatenate(margins))
    num_pairs = len(all_losses)
    error = float(all_losses.std()) / math.sqrt(num_pairs - 1) if num_pairs > 1 else math.nan
    return ValidationResult(float(all_losses.mean()), error, num_pairs, float(wins.mean()))
