"""The calls of a plan for the times after the first: a backend may have quicker ones, see Backend.recorded."""

from itertools import islice

from packtrain.backends.host import Run
from packtrain.debug import flags
from packtrain.placing import Placed


def repeated(placed: Placed, calls: list[Run]) -> list[Run]:
    """As many calls, which do the same in the same order; those given have all been run."""
    if "norecord" in flags():
        return calls
    left, found = iter(calls), list[Run]()
    for backend, steps in placed.splits:
        made = [None if s.source is not None else (s.op, s.inputs, s.attrs) for s in steps]
        found += backend.recorded(made, list(islice(left, len(steps))))
    return found
