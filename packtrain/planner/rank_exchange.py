"""What several processes exchange in a step, when each part of it can leave, and how long the step takes with it."""

from collections.abc import Sequence
from dataclasses import dataclass

from packtrain.distributed import BUCKET
from packtrain.engine.placement import Placed
from packtrain.engine.tensor import Tensor
from packtrain.planner import cost_model
from packtrain.planner.training_plans import MICRO, UPDATE, Plans, runs

LATENCY = 2e-4  # seconds of a message beside its bytes, between processes of two machines of a room
MESSAGE = 4e-5  # that a process is busy with one that leaves and one that comes, measured: of several they add up
MESSAGES = 6  # small ones of a step: the learnt tokens, whether to stop, the loss
PAYLOAD = 0.94  # of a link's bytes: 1,448 of the 1,538 of an Ethernet frame; the rest are headers, TCP's among them
PASSES = 6  # over the bytes of a bucket in memory: packed, added up, unpacked

Bucket = tuple[int, list[Tensor]]  # sums, and the step of the graph that completes the last of them


def buckets_of(micro: Placed) -> list[Bucket]:
    """The sums that a micro-batch adds to, in the order in which they are complete, at least BUCKET numbers each."""
    buckets, waiting, count = list[Bucket](), list[Tensor](), 0
    for at, step in enumerate(micro.steps):
        if step.op.name == "accumulate":
            waiting.append(step.results[0].base)
            count += waiting[-1].spec.size
            if count >= BUCKET:
                buckets.append((at, waiting))
                waiting, count = [], 0
    last = len(micro.steps)
    return [*buckets, (last, waiting)] if waiting else buckets


@dataclass(frozen=True, slots=True)
class Shared:
    """Seconds of a step of one of several processes.

    computing    what it computes
    exchanging   what its link is busy
    waiting      what it does nothing but wait for the link
    """

    computing: float
    exchanging: float
    waiting: float

    @property
    def seconds(self) -> float:
        return self.computing + self.waiting


def shared(plans: Plans, rates: cost_model.Rates, link: float) -> Shared:
    """The model of a step: its ops by their costs; each bucket leaves when it is complete and the link, of so many
    bytes per second, is free; an update, of which each evaluation has one, waits for the last of them."""
    ranks, micro = plans.shape.ranks, plans.placed[MICRO]
    times = runs(plans.shape)
    micro_seconds = cost_model.seconds(micro, rates)
    computing = times[MICRO] * micro_seconds + times[UPDATE] * cost_model.seconds(
        plans.placed[UPDATE], rates
    )
    sent = [(at, sum(t.spec.size for t in sums)) for at, sums in buckets_of(micro)]
    durations = [transfer_seconds(n, ranks, rates, link) for _, n in sent]
    delay = last_arrival(_ready(micro, rates, [at for at, _ in sent]), durations) - micro_seconds
    busy, stalled = _scattered(plans, rates, link)
    messages = MESSAGES * round_seconds(ranks)
    spread = 0.0
    if plans.shape.share is not None:
        numbers = sum(plans.leaves[name].spec.size for name in plans.trained)
        spread = transfer_seconds(numbers, ranks, rates, link) / 2
    waiting = times[UPDATE] * max(delay, 0.0) + times[MICRO] * stalled + messages + spread
    exchanging = times[UPDATE] * sum(durations) + times[MICRO] * busy + messages + spread
    return Shared(computing, exchanging, waiting)


def _scattered(plans: Plans, rates: cost_model.Rates, link: float) -> tuple[float, float]:
    """Seconds that the link is busy, and that a micro-batch waits for it, where its sums are shared out."""
    micro, ranks = plans.placed[MICRO], plans.shape.ranks
    read = {t for step in micro.steps for t in step.reads}
    elapsed = free = busy = stalled = 0.0
    for step in micro.steps:
        elapsed += cost_model.call_seconds(step, rates, read)
        if step.op.name == "reduce_scatter":
            transfer = transfer_seconds(step.reads[1].spec.size, ranks, rates, link) / 2
            free, busy = max(free, elapsed) + transfer, busy + transfer
        elif step.op.name == "arrive" and free > elapsed:
            elapsed, stalled = free, stalled + free - elapsed
    return busy, stalled


def transfer_seconds(numbers: int, ranks: int, rates: cost_model.Rates, link: float) -> float:
    """To add up f32 numbers over ranks: each sends 2 (k - 1) / k of them, in as many exchanges as they need. In one,
    k - 1 messages leave and come at once: they share the way, and are handled one by one."""
    exchanges = 2 * -(-numbers // BUCKET)
    share = 2 * (ranks - 1) / ranks
    return exchanges * (LATENCY + (ranks - 2) * MESSAGE) + 4 * numbers * (
        share / (PAYLOAD * link) + PASSES / rates.nbytes
    )


def round_seconds(ranks: int) -> float:
    """For all to know what each says, a few bytes: gloo passes them around a ring, k - 1 times one message."""
    return (ranks - 1) * LATENCY


def last_arrival(start_times: Sequence[float], durations: Sequence[float]) -> float:
    """When the last of some transfers is done, which go one after the other, each once it is ready."""
    free = 0.0
    for start, seconds in zip(start_times, durations, strict=True):
        free = max(free, start) + seconds
    return free


def _ready(micro: Placed, rates: cost_model.Rates, steps: Sequence[int]) -> list[float]:
    """When these steps of a graph are done."""
    read = {t for step in micro.steps for t in step.reads}
    done, time = list[float](), 0.0
    for step in micro.steps:
        time += cost_model.call_seconds(step, rates, read)
        done.append(time)
    return [done[min(at, len(done) - 1)] for at in steps]
