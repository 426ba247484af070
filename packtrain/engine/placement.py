"""Decides which backend runs each call and where each tensor lives; inserts the copies this needs.

A Graph goes in, a Placed list of steps comes out. The Graph is not changed and can be placed again.
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
from packtrain.engine.step import BEGIN_COPY, FINISH_COPY, KernelStep
from packtrain.engine.tensor import Call, GraphError, Kernel, Tensor
from packtrain.engine.transfer_overlap import overlap_transfers
from packtrain.engine.transfers import TransferCopies, require_kernel

BARRIER = -1  # in a sequence of calls


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A Graph with a backend for every call: steps in order, without views, and the backend where each value lives.

    barriers  counts of steps after which freed bytes may be used again; None: after every step
    """

    graph: Graph
    steps: tuple[KernelStep, ...]
    home: Mapping[Tensor, Backend]
    names: Mapping[Tensor, str]
    barriers: tuple[int, ...] | None = None

    def released(self, step: int) -> int:
        """Return the first step that may overwrite bytes last needed by `step`: the next one, or after a barrier."""
        if self.barriers is None:
            return step + 1
        at = bisect_right(self.barriers, step)
        return self.barriers[at] if at < len(self.barriers) else max(len(self.steps), step + 1)

    @property
    def fingerprint(self) -> str:
        """Hash of the graph's fingerprint and of its placement, by which a plan knows its graph."""
        names = self.names
        lines = [f"{names[leaf]} {self.home[leaf].space}" for leaf in self.graph.leaves]
        lines += [f"{names[s.results[0]]} {s.backend.name} {s.backend.space}" for s in self.steps]
        lines += [] if self.barriers is None else [f"barriers {self.barriers}"]
        text = "\n".join([self.graph.fingerprint, *lines])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def splits(self) -> list[tuple[Backend, list[KernelStep]]]:
        """Stretches of consecutive steps on one backend, each with its steps; copies beside kernels are left out."""
        computing = (s for s in self.steps if s.op not in (BEGIN_COPY, FINISH_COPY))
        return [(b, list(steps)) for b, steps in itertools.groupby(computing, lambda s: s.backend)]

    @property
    def copies(self) -> list[KernelStep]:
        """Steps that copy a value from one memory to another."""
        return [s for s in self.steps if s.source is not None]

    @property
    def offloads(self) -> list[KernelStep]:
        """The steps that copy the graph's `offloaded` values to host memory, and back."""
        finished_copies = {s.inputs[0]: s.results[0] for s in self.steps if s.op is FINISH_COPY}
        copy_steps = [(s, finished_copies.get(s.results[0], s.results[0])) for s in self.copies]
        offloaded = {copy for s, copy in copy_steps if s.reads[0] in self.graph.offloaded}
        return [s for s, copy in copy_steps if not offloaded.isdisjoint((*s.reads, copy))]

    def __str__(self) -> str:
        return "\n".join(
            f"{self.names[step.results[0]]}: {step.op.name} on {step.backend.name}"
            for step in self.steps
        )


def place(graph: Graph, target: Target = CPU, sequence: Sequence[int] | None = None) -> Placed:
    """Give every call a backend: where its weights and states live, else where the fewest bytes must be copied for the
    call, else the first backend that can run it. A value that several calls read in another space is copied once. The
    graph's `offloaded` values are copied to host memory after the last forward call that reads them, and back before
    the first other call.

    Falls back to the `numpy` specification, with a warning, if no backend of the target has a kernel.

    sequence  another order than the written one: indices of all calls, and BARRIERs between calls that may run in
              parallel; bytes are used again only after a barrier. Raises GraphError for an order that cannot run.
    """
    groups = [[call] for call in graph.calls] if sequence is None else grouped(graph, sequence)
    builder = _PlacementBuilder(graph, target, [call for group in groups for call in group])
    builder.add_groups(groups)
    if builder.fallback_ops:
        names, fallback_ops = [b.name for b in target.backends], sorted(builder.fallback_ops)
        warnings.warn(f"no kernel of {names} for {fallback_ops}; using numpy's", stacklevel=2)
    steps, barriers = builder.steps, tuple(builder.barriers)
    is_every_step = barriers == tuple(range(1, len(steps) + 1))
    if is_every_step:
        steps = overlap_transfers(steps, builder.home, builder.names)
    placement = graph, tuple(steps), builder.home, builder.names
    return Placed(*placement, None if is_every_step else barriers)


def grouped(graph: Graph, sequence: Sequence[int]) -> list[list[Call]]:
    """Return the calls of a sequence, grouped between barriers. Raises GraphError if the order cannot run."""
    calls, groups, done_calls = graph.calls, list[list[Call]]([[]]), set[Call]()
    for index in sequence:
        if index == BARRIER:
            groups.append([])
            continue
        if not 0 <= index < len(calls):
            raise GraphError(f"sequence: {index} is no call; the graph has {len(calls)}")
        call = calls[index]
        if call in done_calls:
            raise GraphError(f"sequence: call {index}, {call.op.name}, comes twice")
        for t in call.reads:
            if t.call is not None and t.call not in done_calls:
                problem = f"comes before its input {graph.names[t]}"
                raise GraphError(f"sequence: call {index}, {call.op.name}, {problem}")
        done_calls.add(call)
        groups[-1].append(call)
    missing = [index for index, call in enumerate(calls) if call not in done_calls]
    if missing:
        first = missing[0]
        raise GraphError(f"sequence: call {first}, {calls[first].op.name}, is missing")
    graph.check_handles(call for group in groups for call in group)
    return [group for group in groups if group]


class _PlacementBuilder:
    def __init__(self, graph: Graph, target: Target, order: Sequence[Call]) -> None:
        self.graph, self.backends = graph, target.backends
        self.has_many_backends, self.has_many_spaces = len(target.every) > 1, not target.private
        self.home = dict[Tensor, Backend].fromkeys(graph.leaves, self.backends[0])
        if not target.is_uniform:
            self.home |= {leaf: target.home(leaf) for leaf in graph.leaves}
        self.names = dict(graph.names)
        self.steps: list[KernelStep] = []
        self.barriers: list[int] = []
        self.copies = TransferCopies(graph, order, self.home, self.names, self.steps)
        self.fallback_ops: set[str] = set()

    def add_groups(self, groups: list[list[Call]]) -> None:
        """Add the steps of groups of calls that may run in parallel; those of a single call run one after the other."""
        for group in groups:
            step_start = len(self.steps)
            for call in group:
                if not call.op.view:
                    self._place_call(call)
            end = len(self.steps)
            if end > step_start:
                self.barriers += range(step_start + 1, end + 1) if len(group) == 1 else [end]

    def _place_call(self, call: Call) -> None:
        """Add the step of a call, after the copies that it needs."""
        backend, kernel = self.backends[0], None
        if not (self.has_many_backends or self.fallback_ops):
            kernel = backend.kernel(call.op, call.inputs)
        if kernel is None:
            backend, kernel = self._choose_backend(call)
        for result in call.results:
            base = result.shared or result
            home = self.home.setdefault(base, backend)
            if base.kind and home.space != backend.space:
                raise GraphError(
                    f"{call.op.name}: it runs on {backend.space} and cannot write {base.name}, which lives on "
                    f"{home.space}; all that one call writes must live in one place\n  at {call.location}"
                )
        inputs = list(call.inputs)
        for i, t in enumerate(inputs):
            if t is not None and (t.shared or self.has_many_spaces):
                is_accepted = not t.shared or kernel.accepts(i, t)
                inputs[i] = self.copies.bring_input(call, t, backend, is_accepted)
        self.steps.append(KernelStep(call.op, call, backend, kernel, tuple(inputs), call.results))
        if self.has_many_spaces:
            self.copies.offload_values(call)

    @cached_property
    def reader_spaces(self) -> dict[Tensor, set[str]]:
        """By tensor, the memory spaces where calls read it beside weights or states that live there."""
        spaces: dict[Tensor, set[str]] = {}
        for call in self.graph.calls:
            backend = self._leaf_backend(call)
            if backend is not None:
                for t in call.reads:
                    spaces.setdefault(t.handle, set()).add(backend.space)
        return spaces

    def _leaf_backend(self, call: Call) -> Backend | None:
        """Return the backend of the leaf that the call writes, else of the first weight or state it reads, or None."""
        leaves = [t.base for t in call.reads if t.base.kind in ("weight", "state")]
        written_leaves = [t.base for i in call.op.writes if (t := call.inputs[i]) is not None]
        return self.home[(written_leaves or leaves)[0]] if leaves else None

    def _choose_backend(self, call: Call) -> tuple[Backend, Kernel]:
        """Return the backend with a kernel that is nearest to the call's inputs, and the kernel; if none, numpy's."""
        nearby = self._nearby_backends(call) if self.has_many_backends or self.fallback_ops else ()
        for backend in (*nearby, *self.backends):
            kernel = backend.kernel(call.op, call.inputs)
            if kernel is not None:
                return backend, kernel
        self.fallback_ops.add(call.op.name)
        return numpy, require_kernel(numpy, call, call.op, call.inputs)

    def _nearby_backends(self, call: Call) -> list[Backend]:
        """Return the backends of the call's leaf or inputs, the one to which the fewest bytes must be copied first."""
        if (leaf_backend := self._leaf_backend(call)) is not None:
            return [leaf_backend]
        newest_reads = sorted(call.reads, key=lambda t: -1 if t.call is None else t.call.serial)
        homes = {(b.name, b.space): b for t in reversed(newest_reads) if (b := self.home[t.base])}
        if len({b.space for b in homes.values()}) < 2:
            return [self.home[t.base] for t in call.reads[:1]]
        return sorted(homes.values(), key=lambda backend: self._copied_nbytes(call, backend.space))

    def _copied_nbytes(self, call: Call, space: str) -> int:
        """Return the bytes that are copied if the call runs in a memory space: inputs to it, results from it."""
        remote_inputs = [t for t in call.reads if self.home[t.base].space != space]
        needed = {part for t in remote_inputs if (part := self.copies.part(t, space)) is not None}
        spaces = self.reader_spaces
        copied_results = (t for t in call.results for s in spaces.get(t, ()) if s != space)
        return sum(t.spec.nbytes for t in (*needed, *copied_results))
