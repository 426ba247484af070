"""Copies between memories that travel while other steps run: one step begins a copy, another waits until it is there.

Both the source and the copy keep their bytes in between, as the second step reads them. Of each way from one memory to
another one copy travels at a time, so that little more memory is needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from packtrain.engine.backends import Backend
from packtrain.engine.graph import unique
from packtrain.engine.ops.shape import cont
from packtrain.engine.step import ARRIVE, BEGIN, Step
from packtrain.engine.tensor import Kernel, Tensor
from packtrain.engine.transfers import move

AHEAD = 24  # steps that a copy travels before it is needed, at most, or after its source would else be free


@dataclass(slots=True)
class _Way:
    """A copy that begins before one step and has arrived before another, by their numbers in the written order."""

    step: Step
    carrier: Backend
    begin: int
    end: int


def overlapped(
    steps: Sequence[Step], home: dict[Tensor, Backend], names: dict[Tensor, str]
) -> list[Step]:
    """The steps, with copies in two parts where a backend carries them beside its kernels. What travels gets a home and
    a name."""
    transfers = _ways(steps) if any(step.source for step in steps) else {}
    begins, arrivals = dict[int, list[Step]](), dict[int, list[Step]]()
    used_names = dict.fromkeys(names.values(), 1) if transfers else {}
    for transfer in transfers.values():
        copied, (source,) = transfer.step.results[0], transfer.step.reads
        under_way = cont(source)
        home[under_way], names[under_way] = (
            transfer.step.backend,
            unique(f"{names[copied]} begun", used_names),
        )
        begins.setdefault(transfer.begin, []).append(_begin(transfer, under_way))
        arrivals.setdefault(transfer.end, []).append(_arrive(transfer, under_way))
    reordered = list[Step]()
    for at in range(len(steps) + 1):
        reordered += [*arrivals.get(at, ()), *begins.get(at, ())]
        reordered += [steps[at]] if at < len(steps) and at not in transfers else []
    return reordered


def _ways(steps: Sequence[Step]) -> dict[int, _Way]:
    """By the number of the copy; each as early and as late as its values and the one before allow."""
    writes, read = _touched([s.results for s in steps]), _touched([s.reads for s in steps])
    updates = [at for at, s in enumerate(steps) if s.op.writes]
    transfers, last = dict[int, _Way](), dict[tuple[str, str], _Way]()
    for at, step in enumerate(steps):
        carrier = _carrier(step)
        if carrier is None or step.source is None:
            continue
        source = step.reads[0].base
        is_stored = source.kind in (
            "weight",
            "state",
        )  # its bytes may have a part with another name
        written = updates if is_stored else writes.get(source, [])
        earliest = [*(w + 1 for w in written if w < at), at - AHEAD, 0]
        earliest += [transfers[w].end for w in written if w in transfers]
        latest = [*(r for r in read.get(step.results[0], ()) if r > at), len(steps), at + AHEAD]
        latest += [at + 1] * is_stored
        transfer = _Way(step, carrier, max(earliest), min(latest))
        previous = last.get(key := (step.source.space, step.backend.space))
        if previous is not None:
            transfer.begin = max(transfer.begin, min(previous.end, at))
            previous.end = min(previous.end, transfer.begin)
        transfers[at] = last[key] = transfer
    return transfers


def _touched(groups: Sequence[Sequence[Tensor]]) -> Mapping[Tensor, list[int]]:
    indices = dict[Tensor, list[int]]()
    for at, tensors in enumerate(groups):
        for t in tensors:
            indices.setdefault(t.base, []).append(at)
    return indices


def _carrier(step: Step) -> Backend | None:
    """What carries a copy beside its kernels."""
    endpoints = () if step.source is None else (step.backend, step.source)
    return next((backend for backend in endpoints if backend.streams), None)


def _begin(transfer: _Way, under_way: Tensor) -> Step:
    carrier, step = transfer.carrier, transfer.step
    assert step.source is not None
    peer = step.source if carrier is step.backend else step.backend

    def begin(y: Any, x: Any) -> None:
        carrier.begin(y, x, peer)

    return replace(step, op=BEGIN, kernel=Kernel(begin, strided=False), results=(under_way,))


def _arrive(transfer: _Way, under_way: Tensor) -> Step:
    carrier, step = transfer.carrier, transfer.step

    def arrive(y: Any, in_flight: Any, x: Any) -> None:
        carrier.arrived()
        if not step.backend.overlap(y, in_flight):  # planned without reuse
            move(step.backend, y, step.backend, in_flight)

    kernel, inputs = Kernel(arrive, strided=False), (under_way, *step.inputs)
    return replace(step, op=ARRIVE, kernel=kernel, inputs=inputs, source=None)
