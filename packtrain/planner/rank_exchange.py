"""Predicts the seconds of a step of several processes: which gradients they exchange, and when each can be sent.

An exchange has two rounds, not the 2 (k - 1) of a ring, whose latencies would be five times as long at 1,024 ranks.
Ranks that wait for each other's busy cores are not in the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from packtrain.distributed import BUCKET
from packtrain.engine.placement import Placed
from packtrain.engine.tensor import Tensor
from packtrain.planner import cost_model
from packtrain.planner.cost_model import BackendRates
from packtrain.planner.training_plans import MICRO, UPDATE, TrainingPlans, runs

LATENCY = 2e-4  # seconds of a message beside its bytes, between processes of two machines in a room
MESSAGE = 4e-5  # seconds that a message out and one in keep a process busy; several add up
NUM_STEP_MESSAGES = 6  # small messages of a step: the trained tokens, whether to stop, the loss
PAYLOAD = 0.94  # share of a link's bytes: 1,448 of an Ethernet frame's 1,538, without headers
MEMORY_PASSES = 6  # passes over a bucket's bytes in memory: packed, added up, unpacked

Bucket = tuple[int, list[Tensor]]  # the step that completes the last of these sums, and the sums


def gradient_buckets(micro_graph: Placed) -> list[Bucket]:
    """Return what a rank sends while it computes: gradient sums in the order of completion, in buckets of at least
    BUCKET numbers, each with the step that completes it."""
    buckets, pending_sums, num_pending = list[Bucket](), list[Tensor](), 0
    for step_index, step in enumerate(micro_graph.steps):
        if step.op.name == "accumulate":
            pending_sums.append(step.results[0].base)
            num_pending += pending_sums[-1].spec.size
            if num_pending >= BUCKET:
                buckets.append((step_index, pending_sums))
                pending_sums, num_pending = [], 0
    return [*buckets, (len(micro_graph.steps), pending_sums)] if pending_sums else buckets


@dataclass(frozen=True, slots=True)
class ExchangeTimes:
    """Seconds of a training step on one rank: for computing, of a busy link, and of only waiting for the link."""

    compute_seconds: float
    exchange_seconds: float
    waiting: float

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.waiting


def predict_exchange(plans: TrainingPlans, rates: BackendRates, link_rate: float) -> ExchangeTimes:
    """Predict the seconds of a training step over several processes, linked by `link_rate` bytes per second. A bucket
    of gradients leaves when it is complete and the link is free; updates wait for the last bucket."""
    ranks, micro_graph = plans.shape.world_size, plans.placed_graphs[MICRO]
    num_runs = runs(plans.shape)
    micro_seconds = cost_model.graph_seconds(micro_graph, rates)
    update_seconds = cost_model.graph_seconds(plans.placed_graphs[UPDATE], rates)
    compute_seconds = num_runs[MICRO] * micro_seconds + num_runs[UPDATE] * update_seconds
    sent = [(at, sum(t.spec.size for t in sums)) for at, sums in gradient_buckets(micro_graph)]
    durations = [transfer_seconds(num_sums, ranks, rates, link_rate) for _, num_sums in sent]
    start_times = _ready_times(micro_graph, rates, [step_index for step_index, _ in sent])
    delay = last_arrival_time(start_times, durations) - micro_seconds
    busy, stalled = _scatter_times(plans, rates, link_rate)
    messages = NUM_STEP_MESSAGES * round_seconds(ranks)
    spread = 0.0
    if plans.shape.moment_share is not None:
        num_values = sum(plans.leaves[name].spec.size for name in plans.trained_names)
        spread = transfer_seconds(num_values, ranks, rates, link_rate) / 2
    waiting = num_runs[UPDATE] * max(delay, 0.0) + num_runs[MICRO] * stalled + messages + spread
    exchanging = num_runs[UPDATE] * sum(durations) + num_runs[MICRO] * busy + messages + spread
    return ExchangeTimes(compute_seconds, exchanging, waiting)


def _scatter_times(plans: TrainingPlans, rates: BackendRates, link: float) -> tuple[float, float]:
    """Return seconds that `link` (bytes per second) is busy, and waited for, in a micro-batch with scattered sums."""
    micro_graph, ranks = plans.placed_graphs[MICRO], plans.shape.world_size
    read_tensors = {t for step in micro_graph.steps for t in step.reads}
    elapsed = free_time = busy = stalled_seconds = 0.0
    seconds = cost_model.step_seconds(micro_graph.steps, rates, read_tensors)
    for step, took in zip(micro_graph.steps, seconds, strict=True):
        elapsed += took
        if step.op.name == "reduce_scatter":
            send_seconds = transfer_seconds(step.reads[1].spec.size, ranks, rates, link) / 2
            free_time, busy = max(free_time, elapsed) + send_seconds, busy + send_seconds
        elif step.op.name == "wait_for_sums" and free_time > elapsed:
            elapsed, stalled_seconds = free_time, stalled_seconds + free_time - elapsed
    return busy, stalled_seconds


def transfer_seconds(num_values: int, ranks: int, rates: BackendRates, link_rate: float) -> float:
    """Return the seconds to add up `num_values` f32 numbers over all ranks, with a link of `link_rate` bytes per
    second. Each rank sends 2 (k - 1) / k of the numbers. In an exchange, a process handles k - 1 messages in turn."""
    num_exchanges = 2 * -(-num_values // BUCKET)
    sent_share = 2 * (ranks - 1) / ranks
    byte_seconds = sent_share / (PAYLOAD * link_rate) + MEMORY_PASSES / rates.nbytes
    return num_exchanges * (LATENCY + (ranks - 2) * MESSAGE) + 4 * num_values * byte_seconds


def round_seconds(ranks: int) -> float:
    """Return the seconds until all ranks know a few bytes of each: gloo passes them around a ring in k - 1 messages."""
    return (ranks - 1) * LATENCY


def last_arrival_time(start_times: Sequence[float], durations: Sequence[float]) -> float:
    """Return when the last of several transfers, one after the other on one link, ends; all in seconds; 0 for none."""
    free_time = 0.0
    for start_time, seconds in zip(start_times, durations, strict=True):
        free_time = max(free_time, start_time) + seconds
    return free_time


def _ready_times(micro_graph: Placed, rates: BackendRates, indices: Sequence[int]) -> list[float]:
    """Return the seconds from the start of a graph's run until each of the steps `indices` is done."""
    read_tensors = {t for step in micro_graph.steps for t in step.reads}
    done_times = [*accumulate(cost_model.step_seconds(micro_graph.steps, rates, read_tensors))]
    return [done_times[min(step_index, len(done_times) - 1)] for step_index in indices]
