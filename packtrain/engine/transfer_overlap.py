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
    ways = _ways(steps) if any(step.source for step in steps) else {}
    begins, ends = dict[int, list[Step]](), dict[int, list[Step]]()
    taken = dict.fromkeys(names.values(), 1) if ways else {}
    for way in ways.values():
        copied, (source,) = way.step.results[0], way.step.reads
        under_way = cont(source)
        home[under_way], names[under_way] = (
            way.step.backend,
            unique(f"{names[copied]} begun", taken),
        )
        begins.setdefault(way.begin, []).append(_begin(way, under_way))
        ends.setdefault(way.end, []).append(_arrive(way, under_way))
    found = list[Step]()
    for at in range(len(steps) + 1):
        found += [*ends.get(at, ()), *begins.get(at, ())]
        found += [steps[at]] if at < len(steps) and at not in ways else []
    return found


def _ways(steps: Sequence[Step]) -> dict[int, _Way]:
    """By the number of the copy; each as early and as late as its values and the one before allow."""
    made, read = _touched([s.results for s in steps]), _touched([s.reads for s in steps])
    updates = [at for at, s in enumerate(steps) if s.op.writes]
    found, last = dict[int, _Way](), dict[tuple[str, str], _Way]()
    for at, step in enumerate(steps):
        carrier = _carrier(step)
        if carrier is None or step.source is None:
            continue
        source = step.reads[0].base
        kept = source.kind in ("weight", "state")  # its bytes may have a part with another name
        written = updates if kept else made.get(source, [])
        before = [*(w + 1 for w in written if w < at), at - AHEAD, 0]
        before += [found[w].end for w in written if w in found]
        after = [*(r for r in read.get(step.results[0], ()) if r > at), len(steps), at + AHEAD]
        after += [at + 1] * kept
        way = _Way(step, carrier, max(before), min(after))
        previous = last.get(key := (step.source.space, step.backend.space))
        if previous is not None:
            way.begin = max(way.begin, min(previous.end, at))
            previous.end = min(previous.end, way.begin)
        found[at] = last[key] = way
    return found


def _touched(each: Sequence[Sequence[Tensor]]) -> Mapping[Tensor, list[int]]:
    found = dict[Tensor, list[int]]()
    for at, tensors in enumerate(each):
        for t in tensors:
            found.setdefault(t.base, []).append(at)
    return found


def _carrier(step: Step) -> Backend | None:
    """What carries a copy beside its kernels."""
    ends = () if step.source is None else (step.backend, step.source)
    return next((backend for backend in ends if backend.streams), None)


def _begin(way: _Way, under_way: Tensor) -> Step:
    carrier, step = way.carrier, way.step
    assert step.source is not None
    other = step.source if carrier is step.backend else step.backend

    def begin(y: Any, x: Any) -> None:
        carrier.begin(y, x, other)

    return replace(step, op=BEGIN, kernel=Kernel(begin, strided=False), results=(under_way,))


def _arrive(way: _Way, under_way: Tensor) -> Step:
    carrier, step = way.carrier, way.step

    def arrive(y: Any, begun: Any, x: Any) -> None:
        carrier.arrived()
        if not step.backend.overlap(y, begun):  # planned without reuse
            move(step.backend, y, step.backend, begun)

    kernel, inputs = Kernel(arrive, strided=False), (under_way, *step.inputs)
    return replace(step, op=ARRIVE, kernel=kernel, inputs=inputs, source=None)
