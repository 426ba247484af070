"""Decides which backend runs each call and where each tensor lives; inserts the copies this needs.

A Graph goes in, a Placed list of Steps comes out. The Graph is not changed and can be placed again.
"""

import hashlib
import itertools
import warnings
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from packtrain.engine.backends import CPU, Backend, Target, numpy
from packtrain.engine.graph import Graph
from packtrain.engine.ops.shape import cont
from packtrain.engine.step import ARRIVE, BEGIN, Step
from packtrain.engine.tensor import Call, GraphError, Kernel, Tensor
from packtrain.engine.transfer_overlap import overlapped
from packtrain.engine.transfers import Copies, known

BARRIER = -1  # in a sequence of calls


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A Graph with a backend for every call: steps in order without views, and a home per storage.

    barriers  numbers of steps after which bytes may be used again; None: after every step
    """

    graph: Graph
    steps: tuple[Step, ...]
    home: Mapping[Tensor, Backend]
    names: Mapping[Tensor, str]
    barriers: tuple[int, ...] | None = None

    def released(self, step: int) -> int:
        """The first step that may use bytes that a step was the last to need."""
        if self.barriers is None:
            return step + 1
        at = bisect_right(self.barriers, step)
        return self.barriers[at] if at < len(self.barriers) else max(len(self.steps), step + 1)

    @property
    def fingerprint(self) -> str:
        """Equal for equal graphs (see Graph) with the same placement."""
        lines = [f"{self.names[leaf]} {self.home[leaf].space}" for leaf in self.graph.leaves]
        lines += [
            f"{self.names[s.results[0]]} {s.backend.name} {s.backend.space}" for s in self.steps
        ]
        lines += [] if self.barriers is None else [f"barriers {self.barriers}"]
        text = "\n".join([self.graph.fingerprint, *lines])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def splits(self) -> list[tuple[Backend, list[Step]]]:
        """Runs of steps on one backend; copies that begin or arrive meanwhile belong to none."""
        placed_steps = (s for s in self.steps if s.op not in (BEGIN, ARRIVE))
        return [
            (b, list(steps)) for b, steps in itertools.groupby(placed_steps, lambda s: s.backend)
        ]

    @property
    def copies(self) -> list[Step]:
        """Steps that copy a value from one memory to another."""
        return [s for s in self.steps if s.source is not None]

    @property
    def put_away(self) -> list[Step]:
        """Those of the graph's `away` to the process's memory, and back."""
        arrived = {s.inputs[0]: s.results[0] for s in self.steps if s.op is ARRIVE}
        copied = [(s, arrived.get(s.results[0], s.results[0])) for s in self.copies]
        offloaded = {copy for s, copy in copied if s.reads[0] in self.graph.away}
        return [s for s, copy in copied if not offloaded.isdisjoint((*s.reads, copy))]

    def __str__(self) -> str:
        return "\n".join(
            f"{self.names[step.results[0]]}: {step.op.name} on {step.backend.name}"
            for step in self.steps
        )


def place(graph: Graph, target: Target = CPU, sequence: Sequence[int] | None = None) -> Placed:
    """Give every call a backend: where its weights and states live, else where the fewest bytes must be copied for
    it, else the first that can. What several calls read in another space is copied once. The graph's `away` is copied
    to the process's memory after the last forward call that reads it, and back before the first other one.

    Falls back to the `numpy` specification, with a warning, if no backend of the target has a kernel.

    sequence  another order than the written one: indices of all calls, and BARRIERs between calls that could run side
              by side; bytes are used again only after a barrier. Raises GraphError for an order that cannot run.
    """
    groups = [[call] for call in graph.calls] if sequence is None else grouped(graph, sequence)
    placing = _Placing(graph, target, [call for group in groups for call in group])
    for group in groups:
        placing.run(group)
    if placing.fallen:
        warnings.warn(
            f"no kernel of {[b.name for b in target.backends]} for {sorted(placing.fallen)}; using numpy's",
            stacklevel=2,
        )
    steps, barriers = placing.steps, tuple(placing.barriers)
    everywhere = barriers == tuple(range(1, len(steps) + 1))
    if everywhere:
        steps = overlapped(steps, placing.home, placing.names)
    parts = graph, tuple(steps), placing.home, placing.names
    return Placed(*parts, None if everywhere else barriers)


def grouped(graph: Graph, sequence: Sequence[int]) -> list[list[Call]]:
    """The calls of a sequence, in groups between barriers. Raises GraphError if it cannot run."""
    calls, groups, done = graph.calls, list[list[Call]]([[]]), set[Call]()
    for index in sequence:
        if index == BARRIER:
            groups.append([])
            continue
        if not 0 <= index < len(calls):
            raise GraphError(f"sequence: {index} is no call; the graph has {len(calls)}")
        call = calls[index]
        if call in done:
            raise GraphError(f"sequence: call {index}, {call.op.name}, comes twice")
        for t in call.reads:
            if t.call is not None and t.call not in done:
                raise GraphError(
                    f"sequence: call {index}, {call.op.name}, comes before its input {graph.names[t]}"
                )
        done.add(call)
        groups[-1].append(call)
    missing = [index for index, call in enumerate(calls) if call not in done]
    if missing:
        first = missing[0]
        raise GraphError(f"sequence: call {first}, {calls[first].op.name}, is missing")
    graph.check_handles(call for group in groups for call in group)
    return [group for group in groups if group]


class _Placing:
    def __init__(self, graph: Graph, target: Target, order: Sequence[Call]) -> None:
        self.graph, self.among, self.several = graph, target.backends, len(target.every) > 1
        self.home = {leaf: target.home(leaf) for leaf in graph.leaves}
        self.names = dict(graph.names)
        self.steps: list[Step] = []
        self.barriers: list[int] = []
        self.copies = Copies(graph, order, self.home, self.names, self._copy)
        self.fallen: set[str] = set()

    def run(self, group: list[Call]) -> None:
        """Add calls that may run side by side; the steps of a single one run one after the other."""
        begin = len(self.steps)
        for call in group:
            self._add(call)
        end = len(self.steps)
        if end > begin:
            self.barriers += range(begin + 1, end + 1) if len(group) == 1 else [end]

    def _add(self, call: Call) -> None:
        if call.op.view:
            return
        backend, kernel = self._choose(call)
        for t in (
            t for t in call.results if t.base.kind and self.home[t.base].space != backend.space
        ):
            raise GraphError(
                f"{call.op.name}: it runs on {backend.space} and cannot write {t.base.name}, which lives on "
                f"{self.home[t.base].space}; all that one call writes must live in one place\n  at {call.where}"
            )
        inputs = [
            t if t is None else self.copies.bring(call, t, backend, kernel.takes(i, t))
            for i, t in enumerate(call.inputs)
        ]
        for t in call.results:
            self.home.setdefault(t.base, backend)
        self.steps.append(Step(call.op, call, backend, kernel, tuple(inputs), call.results))
        self.copies.put_away(call)

    def _copy(
        self,
        call: Call,
        at: Backend,
        kernel: Kernel,
        t: Tensor,
        copy: Tensor,
        source: Backend | None,
    ) -> None:
        self.steps.append(Step(cont, call, at, kernel, (t,), (copy,), source))

    @cached_property
    def wanted(self) -> dict[Tensor, set[str]]:
        """The spaces where a result is read beside weights or states that live there."""
        spaces: dict[Tensor, set[str]] = {}
        for call in self.graph.calls:
            backend = self._tied(call)
            if backend is not None:
                for t in call.reads:
                    spaces.setdefault(t.handle, set()).add(backend.space)
        return spaces

    def _tied(self, call: Call) -> Backend | None:
        """Where the leaf lives that the call writes, or the first weight or state that it reads, if any."""
        leaves = [t.base for t in call.reads if t.base.kind in ("weight", "state")]
        written = [t.base for i in call.op.writes if (t := call.inputs[i]) is not None]
        return self.home[(written or leaves)[0]] if leaves else None

    def _choose(self, call: Call) -> tuple[Backend, Kernel]:
        nearby = self._near(call) if self.several or self.fallen else ()
        for backend in (*nearby, *self.among):
            kernel = backend.kernel(call.op, call.inputs)
            if kernel is not None:
                return backend, kernel
        self.fallen.add(call.op.name)
        return numpy, known(numpy, call, call.op, call.inputs)

    def _near(self, call: Call) -> list[Backend]:
        """Where it is tied to, or its inputs are: first where the fewest bytes are copied for it and its results."""
        if (tied := self._tied(call)) is not None:
            return [tied]
        latest = sorted(call.reads, key=lambda t: -1 if t.call is None else t.call.serial)
        homes = {(b.name, b.space): b for t in reversed(latest) if (b := self.home[t.base])}
        if len({b.space for b in homes.values()}) < 2:
            return [self.home[t.base] for t in call.reads[:1]]
        return sorted(homes.values(), key=lambda backend: self._copied(call, backend.space))

    def _copied(self, call: Call, space: str) -> int:
        """Bytes that are copied if the call runs in a space: of its inputs to there, of its results from there."""
        remote = [t for t in call.reads if self.home[t.base].space != space]
        needed = {part for t in remote if (part := self.copies.part(t, space)) is not None}
        left = (
            t
            for t in call.results
            for target_space in self.wanted.get(t, ())
            if target_space != space
        )
        return sum(t.spec.nbytes for t in (*needed, *left))
