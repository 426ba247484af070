"""What backends do for plans before and between runs: take what kernels need, see Backend.reserve, and have quicker
calls for the times after the first, see Backend.recorded. Those of kernels with entries are made by compiled code, see
Table."""

from array import array
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any

import numpy as np

from packtrain.common.debug import flags
from packtrain.engine.backends.host import HOST, Run, later
from packtrain.engine.memory_plan import Place
from packtrain.engine.placement import Placed
from packtrain.kernels import ahead, machine
from packtrain.kernels.joined import joined


def repeated(placed: Placed, calls: list[Run]) -> list[Run]:
    """As many calls, which do the same in the same order; those given have all been run."""
    if "norecord" in flags():
        return calls
    left, runs = iter(calls), list[Run]()
    for backend, run in groupby(placed.steps, lambda step: step.backend):
        recorded = [None if step.alone else step.made for step in run]
        runs += backend.recorded(recorded, list(islice(left, len(recorded))))
    return runs


def reserve(graphs: Iterable[Placed], arenas: Mapping[Place, tuple[int, Any]]) -> None:
    """Take what the kernels of all these need at once, before any of them runs; and lock this process's arenas where
    copies reach them meanwhile."""
    steps = [step for placed in graphs for step in placed.steps]
    for backend in {step.backend for step in steps}:
        backend.reserve(s.made for s in steps if s.backend is backend and not s.alone)
        for (space, _), (_, buffer) in arenas.items() if backend.streams else ():
            if space == HOST:
                backend.lock(buffer)


class Table:
    """Calls by the entries of their kernels (see kernels.machine), for compiled code to make one after the other."""

    def __init__(self, placed: Placed, calls: Sequence[Run]) -> None:
        self.rows, self._kept = np.zeros((len(calls), 2), np.int64), list[Any]()
        self.calls, self._placed, self._counts = calls, placed, dict[tuple[str, ...], int]()
        self._whole = later in calls  # what has been recorded must not be cut
        # of updates the executor has to know which of them have begun
        raw_calls = [
            getattr(call, "plain", call) if step.op.repeatable or not step.op.writes else None
            for step, call in zip(placed.steps, calls, strict=True)
        ]
        for at, call in enumerate(raw_calls):
            self._enter(at, call)
        for at, end, merged in joined(raw_calls):
            self._enter(at, merged)
            self.rows[at + 1 : end, 0] = ahead.load("call").MADE

    def _enter(self, at: int, call: Any) -> None:
        entry, kernel = machine.entered.get(getattr(call, "func", None), (0, None))
        if kernel is not None:
            words = array("q", machine.words_of(kernel, call.args))
            self.rows[at] = entry, words.buffer_info()[0]
            self._kept += words, call

    def needed(self, only: Container[str] | None) -> int:
        """How many of the calls are needed for all outputs, or for these, and for all updates."""
        graph = self._placed.graph
        names = tuple(name for name in graph.outputs if only is None or name in only)
        if names not in self._counts:
            bases = {graph.outputs[name].base for name in names}
            end_indices = [
                at + 1
                for at, step in enumerate(self._placed.steps)
                if self._whole or step.op.writes or any(t.base in bases for t in step.results)
            ]
            self._counts[names] = max(end_indices, default=0)
        return self._counts[names]

    def others(self, count: int) -> Iterator[int]:
        """Make calls 0 … count - 1, but those without an entry, or that fail: their numbers, for the caller to make."""
        at, run_all, done_mark = 0, ahead.load("call").run_all, ahead.load("call").MADE
        while (at := run_all(self.rows, at, count)) < count:
            yield at
            at += 1
            while at < count and self.rows[at, 0] == done_mark:
                yield at
                at += 1


def tabled(placed: Placed, calls: Sequence[Run]) -> Table | None:
    """The table of calls that have all been run; None if none of them has an entry."""
    table = None if "norecord" in flags() else Table(placed, calls)
    return table if table is not None and table.rows[:, 0].any() else None
