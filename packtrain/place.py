"""Decides which backend runs each call and where each tensor lives; inserts the copies this needs.

A Graph goes in, a Placed list of Steps comes out. The Graph is not changed and can be placed again.
"""

import hashlib
import itertools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packtrain.backends import CPU, Backend, Target, numpy
from packtrain.graph import Graph, unique
from packtrain.ops.shape import cont
from packtrain.tensor import Call, GraphError, Kernel, Op, Spec, Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One kernel run: `kernel(results, *inputs, **attrs)` on `backend`, for `call` of the graph."""

    op: Op[..., Any]
    call: Call
    backend: Backend
    kernel: Kernel
    inputs: tuple[Tensor | None, ...]
    results: tuple[Tensor, ...]

    @property
    def reads(self) -> list[Tensor]:
        return [t for t in self.inputs if t is not None]

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes for its kernel; an inserted copy has none."""
        return self.call.attrs if self.op is self.call.op else {}

    @property
    def workspaces(self) -> tuple[Spec, ...]:
        """Scratch that its kernel needs while it runs."""
        return self.backend.workspaces(self.op, self.inputs, self.attrs)


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A Graph with a backend for every call: steps in written order without views, and a home per storage."""

    graph: Graph
    steps: tuple[Step, ...]
    home: Mapping[Tensor, Backend]
    names: Mapping[Tensor, str]

    @property
    def fingerprint(self) -> str:
        """Equal for equal graphs (see Graph) with the same placement."""
        lines = [f"{self.names[leaf]} {self.home[leaf].space}" for leaf in self.graph.leaves]
        lines += [
            f"{self.names[s.results[0]]} {s.backend.name} {s.backend.space}" for s in self.steps
        ]
        text = "\n".join([self.graph.fingerprint, *lines])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def splits(self) -> list[tuple[Backend, list[Step]]]:
        """Runs of steps on one backend."""
        return [(b, list(steps)) for b, steps in itertools.groupby(self.steps, lambda s: s.backend)]

    def __str__(self) -> str:
        return "\n".join(
            f"{self.names[step.results[0]]}: {step.op.name} on {step.backend.name}"
            for step in self.steps
        )


def place(graph: Graph, target: Target = CPU) -> Placed:
    """Give every call a backend: where its leaves live, else where its inputs are, else the first that can.

    Falls back to the `numpy` specification, with a warning, if no backend of the target has a kernel.
    """
    placing = _Placing(graph, target)
    for call in graph.calls:
        placing.add(call)
    if placing.fallen:
        warnings.warn(
            f"no kernel of {[b.name for b in target.backends]} for {sorted(placing.fallen)}; using numpy's",
            stacklevel=2,
        )
    return Placed(graph, tuple(placing.steps), placing.home, placing.names)


class _Placing:
    def __init__(self, graph: Graph, target: Target) -> None:
        self.among = target.backends
        self.home = {leaf: target.home(leaf) for leaf in graph.leaves}
        self.names = dict(graph.names)
        self.taken = dict.fromkeys(graph.names.values(), 1)
        self.steps: list[Step] = []
        self.copies: dict[tuple[Tensor, str], Tensor] = {}
        self.fallen: set[str] = set()

    def add(self, call: Call) -> None:
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
            t if t is None else self._bring(call, t, backend, kernel.takes(i, t))
            for i, t in enumerate(call.inputs)
        ]
        for t in call.results:
            self.home.setdefault(t.base, backend)
        self.steps.append(Step(call.op, call, backend, kernel, tuple(inputs), call.results))

    def _choose(self, call: Call) -> tuple[Backend, Kernel]:
        near = [
            self.home[t.base]
            for t in sorted(call.reads, key=lambda t: t.base.kind not in ("weight", "state"))
        ]
        for backend in (*near[:1], *self.among):
            kernel = backend.kernel(call.op, call.inputs)
            if kernel is not None:
                return backend, kernel
        self.fallen.add(call.op.name)
        return numpy, _known(numpy, call, call.op, call.inputs)

    def _bring(self, call: Call, t: Tensor, backend: Backend, taken: bool) -> Tensor:
        """t, or a copy of it that `backend` can read: dense if its kernel wants that, in its space."""
        source = self.home[t.base]
        if not (taken and (t.dense or source.space == backend.space)):
            dense = _known(source, call, cont, (t,))
            t = self._copy(call, t, source, dense, f"{self.names[t]} dense")
        if source.space != backend.space:
            moved = Kernel(lambda y, x: _move(backend, y, source, x), strided=False)
            t = self._copy(call, t, backend, moved, f"{self.names[t]} on {backend.space}")
        return t

    def _copy(self, call: Call, t: Tensor, backend: Backend, kernel: Kernel, name: str) -> Tensor:
        if (t, backend.space) not in self.copies:
            copy = self.copies[t, backend.space] = cont(t)
            self.home[copy], self.names[copy] = backend, unique(name, self.taken)
            self.steps.append(Step(cont, call, backend, kernel, (t,), (copy,)))
        return self.copies[t, backend.space]


def _known(
    backend: Backend, call: Call, op: Op[..., Any], inputs: tuple[Tensor | None, ...]
) -> Kernel:
    kernel = backend.kernel(op, inputs)
    if kernel is None:
        raise GraphError(f"{op.name} has no kernel at all on {backend.name}\n  at {call.where}")
    return kernel


def _move(backend: Backend, y: Any, source: Backend, x: Any) -> None:
    """Copy an array from one space to another."""
    source.sync()
    backend.write(y, source.read(x))
