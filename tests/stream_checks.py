"""Copies that travel beside other work, with memories of the host that only pretend: their copies happen as late, or as
early, as they may. Checked by bits, and by the verifier. See faults_plans."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import packtrain as pt
from packtrain.engine import backends
from packtrain.engine.backends import Backend, Host, SeparateHost, Target
from packtrain.engine.placement import Placed
from packtrain.engine.step import BEGIN_COPY, FINISH_COPY
from tests import checks
from tests.random_graphs import random_case

WAITING = dict[str, list[Callable[[], None]]]()
BUSY = {"most": 0}


@dataclass(frozen=True, slots=True)
class Streamed(SeparateHost):
    """Copies are made when somebody waits for them, if `is_late`, and are NaN until then; or at once, and then the
    source is read no more."""

    is_late: bool = True

    @property
    def streams(self) -> bool:
        return True

    def begin_copy(self, to: Any, source: Any, peer: Backend) -> None:
        assert self.space != peer.space
        waiting = WAITING.setdefault(self.space, [])
        if self.is_late:
            Host.fill(self, to, 255)
            waiting.append(lambda: np.copyto(to, source))
        else:
            np.copyto(to, source)
            waiting.append(lambda: None)
        BUSY["most"] = max(BUSY["most"], sum(map(len, WAITING.values())))

    def wait_for_copies(self) -> None:
        for copy in WAITING.pop(self.space, ()):
            copy()

    def sync(self) -> None:
        """A run ends with nothing under way; before, kernels are done when they return."""


def spread_case(seed: int, is_late: bool) -> tuple[pt.Graph, dict[str, np.ndarray], Placed]:
    """A random graph with leaves in three memories, two of which have streams."""
    case = random_case(seed)
    written = {t.base for t in case.graph.updates}
    rng = np.random.default_rng(seed)
    all_backends = [
        backends.cpu,
        *(Streamed("cpu", name, is_late=is_late) for name in ("left", "right")),
    ]
    movable = [t for t in case.graph.leaves if t not in written and t.kind != "constant"]
    homes = {leaf.label: all_backends[int(rng.integers(3))] for leaf in movable}
    return case.graph, case.values, pt.place(case.graph, Target(tuple(all_backends), homes))


def check_bits(seed: int, is_late: bool) -> None:
    """Nothing is read before it has arrived, and no source is written before it has left."""
    graph, values, placed = spread_case(seed, is_late)
    for plan in (pt.make_plan(placed), pt.make_plan(placed, reuse=False)):
        run = pt.Session().executor(placed, plan)
        with pt.debug("poison"):
            got = [checks.execute(run, values) for _ in range(2)]
        for output in got:
            checks.assert_same_bits(output, checks.run_graph(graph, values), f"seed {seed}")
        assert not WAITING


def check_late() -> None:
    for seed in range(16):
        check_bits(seed, True)


def check_early() -> None:
    for seed in range(16):
        check_bits(seed, False)


def check_verified() -> None:
    """By the verifier alone; copies begin before the steps between which they were written, and arrive after."""
    between = 0
    for seed in range(16):
        _, _, placed = spread_case(seed, True)
        pt.verify(pt.make_plan(placed), placed)
        at = {s.results[0]: i for i, s in enumerate(placed.steps) if s.op is BEGIN_COPY}
        intervals = [(at[s.reads[0]], i) for i, s in enumerate(placed.steps) if s.op is FINISH_COPY]
        assert len(at) == len(intervals) == len(placed.copies)
        between += sum(end - begin - 1 for begin, end in intervals)
    assert between > 80, between
