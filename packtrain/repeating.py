"""What backends do for plans before and between runs: take what kernels need, see Backend.reserve, and have quicker
calls for the times after the first, see Backend.recorded."""

from collections.abc import Iterable, Mapping
from itertools import groupby, islice
from typing import Any

from packtrain.backends.host import HOST, Run
from packtrain.debug import flags
from packtrain.placing import Placed
from packtrain.planning import Place


def repeated(placed: Placed, calls: list[Run]) -> list[Run]:
    """As many calls, which do the same in the same order; those given have all been run."""
    if "norecord" in flags():
        return calls
    left, found = iter(calls), list[Run]()
    for backend, run in groupby(placed.steps, lambda step: step.backend):
        made = [None if step.alone else step.made for step in run]
        found += backend.recorded(made, list(islice(left, len(made))))
    return found


def reserve(every: Iterable[Placed], arenas: Mapping[Place, tuple[int, Any]]) -> None:
    """Take what the kernels of all these need at once, before any of them runs; and lock this process's arenas where
    copies reach them meanwhile."""
    steps = [step for placed in every for step in placed.steps]
    for backend in {step.backend for step in steps}:
        backend.reserve(s.made for s in steps if s.backend is backend and not s.alone)
        for (space, _), (_, buffer) in arenas.items() if backend.streams else ():
            if space == HOST:
                backend.lock(buffer)
