"""Session and Executor: bind a plan to memory once, then run its kernels in order.

The Session owns the bytes: leaves by name, and one arena per space that all its plans share. An Executor owns
nothing; it is a list of calls with their arrays.
"""

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from packtrain.common.debug import flags
from packtrain.common.errors import DoesNotFit
from packtrain.engine.backends import Backend, aligned
from packtrain.engine.instrumentation import CHECKS, Bound, Observer, Run, See, report
from packtrain.engine.memory_plan import Place, Plan, make_plan
from packtrain.engine.placement import Placed
from packtrain.engine.replayed_calls import Table, repeated, reserve, tabled
from packtrain.engine.step import Step
from packtrain.engine.tensor import Spec, Tensor
from packtrain.engine.value_checks import RunError as RunError
from packtrain.engine.value_checks import fitting

K = TypeVar("K")
Stop = Callable[[], bool] | None
Names = Container[str] | None


class Stopped(Exception):
    """A run was stopped between two steps."""


@dataclass(slots=True)
class _Leaf:
    spec: Spec
    backend: Backend
    given: bool
    buffer: Any = None
    offset: int = 0

    @property
    def array(self) -> Any:
        return self.backend.view(self.buffer, self.offset, self.spec, self.spec.strides)


class Session:
    """Leaves, allocated once by name, and arenas as large as the largest plan needs.

    Leaves of one graph, or of several `executors`, share a buffer per space. An executor that is added later may move
    the arena; one that needs more of a space than `limits` allow is refused. Sessions may run in threads.
    """

    def __init__(self, limits: Mapping[str, int] = MappingProxyType({})) -> None:
        self.limits = limits
        self.dirty: str | None = None
        self.generation = 0
        self._leaves: dict[str, _Leaf] = {}
        self._shared: dict[str, np.ndarray] = {}
        self._constants: dict[Tensor, _Leaf] = {}
        self._within: dict[str, tuple[str, int]] = {}
        self._arenas: dict[Place, tuple[int, Any]] = {}
        self._running = threading.Lock()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """`with session.alone():` nothing else runs in it; other sessions do. Raises RunError if something does."""
        if not self._running.acquire(blocking=False):
            raise RunError(
                "another executor of this session is running; its arena has room for one"
            )
        try:
            yield
        finally:
            self._running.release()

    def share(self, values: Mapping[str, np.ndarray]) -> None:
        """Use these arrays as leaves, such as weights mapped from a file: copied only if they are not contiguous and
        aligned, or if the backend cannot read them."""
        for name in values.keys() & self._leaves.keys():
            raise RunError(f"{name} has its memory already; call share before creating executors")
        for name, value in values.items():
            self._shared[name] = np.require(value, requirements=["C", "A"]).view()
            self._shared[name].flags.writeable = False

    def overlay(self, parts: Mapping[str, tuple[str, int]]) -> None:
        """Let states be parts of other leaves: the same bytes, from that element of that leaf on."""
        self._within.update(parts)

    def executor(self, placed: Placed, plan: Plan | None = None) -> "Executor":
        """Bind a placed graph, by its plan (planned here if none is given), to this session's memory."""
        return self.executors({0: placed}, {} if plan is None else {0: plan})[0]

    def executors(
        self, placed: Mapping[K, Placed], plans: Mapping[K, Plan] | None = None
    ) -> dict[K, "Executor"]:
        """Executors of several graphs, whose leaves are allocated together, and their arenas."""
        plan_map, reuse = plans or {}, "noreuse" not in flags()
        bound = {n: (p, plan_map.get(n) or make_plan(p, reuse=reuse)) for n, p in placed.items()}
        for graph, plan in bound.values():
            plan.check_belongs(graph)
            if excess := plan.beyond(self.limits):
                raise DoesNotFit(excess)
            report(graph, plan)
        self._allocate(placed.values())
        for name in (name for graph in placed.values() for name in graph.graph.written):
            self._own(name)
        self._make_room(bound.values())
        reserve(placed.values(), self._arenas)
        return {name: Executor(self, *graph) for name, graph in bound.items()}

    def _make_room(self, bound: Iterable[tuple[Placed, Plan]]) -> None:
        """Arenas as large as the largest plan needs: a small one first would be held beside it."""
        pairs = [(arena, placed) for placed, plan in bound for arena in plan.arenas]
        for arena, placed in sorted(pairs, key=lambda pair: -pair[0].nbytes):  # the largest first
            if arena.nbytes > self._arenas.get(arena.place, (-1, None))[0]:
                backend = next(b for b in placed.home.values() if b.space == arena.space)
                self._arenas[arena.place] = arena.nbytes, backend.alloc(arena.nbytes)
                self.generation += 1

    def _allocate(self, graphs: Iterable[Placed]) -> None:
        """Allocate all leaves of graphs that this session does not have yet, in one buffer per space."""
        adopted = [self._adopt(leaf, p.home[leaf]) for p in graphs for leaf in p.graph.leaves]
        parts = [name for name in self._within if name in self._leaves]
        nested = {id(self._leaves[name]) for name in parts}
        waiting = (
            leaf for leaf in adopted if leaf and leaf.buffer is None and id(leaf) not in nested
        )
        new, tops = {id(leaf): leaf for leaf in waiting}.values(), dict[str, int]()
        for leaf_slot in new:
            leaf_slot.offset = tops.get(leaf_slot.backend.space, 0)
            tops[leaf_slot.backend.space] = leaf_slot.offset + aligned(
                leaf_slot.spec.nbytes, leaf_slot.backend.alignment
            )
        backends = {leaf_slot.backend.space: leaf_slot.backend for leaf_slot in new}
        buffers = {space: backend.alloc(tops[space]) for space, backend in backends.items()}
        for leaf_slot in new:
            leaf_slot.buffer = buffers[leaf_slot.backend.space]
        for name in parts:
            of, start = self._within[name]
            leaf_slot, parent = self._leaves[name], self._leaves[of]
            leaf_slot.buffer, leaf_slot.offset = (
                parent.buffer,
                parent.offset + leaf_slot.spec.dtype.row_nbytes(start),
            )
        for t, constant in self._constants.items():
            if not constant.given and t.value is not None:
                constant.backend.write(constant.array, t.value)
                constant.given = True

    def _adopt(self, leaf: Tensor, backend: Backend) -> _Leaf | None:
        """The session's leaf, without a buffer if it is new and not shared; None for an input."""
        if leaf.kind == "constant":
            return self._constants.setdefault(leaf, _Leaf(leaf.spec, backend, False))
        if leaf.kind not in ("weight", "state"):
            return None
        existing, shared = self._leaves.get(leaf.label), self._shared.get(leaf.label)
        if existing is None:
            has_value = shared is not None or leaf.kind == "state"
            existing = self._leaves[leaf.label] = _Leaf(leaf.spec, backend, has_value)
            if shared is not None:
                existing.buffer = backend.share(fitting(leaf.label, shared, leaf.spec, "no"))
        elif existing.spec != leaf.spec or existing.backend.space != backend.space:
            location = f"{existing.spec} on {existing.backend.space}"
            raise RunError(
                f"{leaf.name} is {location} in this session, the graph wants {leaf.spec} on {backend.space}"
            )
        return existing

    def array(self, t: Tensor) -> Any:
        """The session's own array of a leaf, or of a view of one; it changes as the session runs."""
        base = t.base
        leaf = self._constants[base] if base.kind == "constant" else self._leaves[base.label]
        return leaf.backend.view(leaf.buffer, leaf.offset + t.offset, t.spec, t.strides)

    def buffer(self, space: str, name: str = "") -> Any:
        """An arena."""
        return self._arenas[space, name][1]

    def set(self, values: Mapping[str, np.ndarray]) -> None:
        """Give leaves their values by name; shapes must be the leaves' own. Setting all cleans a dirty session."""
        for name, value in values.items():
            leaf = self._own(name)
            leaf.backend.write(leaf.array, fitting(name, value, leaf.spec))
            leaf.given = True
        if {*values, *self._shared, *self._within} >= self._leaves.keys():
            self.dirty = None

    def fill(self, name: str, make: Callable[[np.ndarray], None]) -> None:
        """Let `make` write a leaf's value in place; for values too large for a temporary copy."""
        leaf, spec = self._own(name), self._known(name).spec
        window = leaf.backend.window(leaf.array)
        if window is not None:
            make(window)
        else:
            value = np.empty(spec.dtype.array_shape(spec.shape), spec.dtype.numpy)
            make(value)
            leaf.backend.write(leaf.array, value)
        leaf.given = True

    def get(self, name: str) -> np.ndarray:
        """A copy of a leaf's value. Raises RunError when a failed update left the session dirty."""
        leaf = self._clean(name)
        return leaf.backend.read(leaf.array)

    def view(self, name: str) -> np.ndarray:
        """A read-only view of a leaf's value, for saving without a copy; a copy if the host cannot access it.

        Raises RunError as `get` does.
        """
        leaf = self._clean(name)
        window = leaf.backend.window(leaf.array)
        shown = leaf.backend.read(leaf.array) if window is None else window.view()
        shown.flags.writeable = False
        return shown

    def _clean(self, name: str) -> _Leaf:
        if self.dirty:
            raise RunError(f"the session is dirty and must not be saved: {self.dirty}")
        return self._known(name)

    def _own(self, name: str) -> _Leaf:
        if name in self._shared:
            raise RunError(f"{name} is a shared array; it cannot be changed here")
        return self._known(name)

    def _known(self, name: str) -> _Leaf:
        if name not in self._leaves:
            raise RunError(
                f"no leaf is called {name}; there are {', '.join(sorted(self._leaves)) or 'none'}"
            )
        return self._leaves[name]

    def unset(self, placed: Placed) -> list[str]:
        """Weights of a graph that never got a value."""
        weights = [leaf.label for leaf in placed.graph.leaves if leaf.kind == "weight"]
        return [name for name in weights if not self._leaves[name].given]


class Executor:
    """One plan, bound to its session's memory: `executor(inputs) -> outputs by name`.

    at    the step that runs, or ran last
    runs  how often all steps have run
    """

    def __init__(self, session: Session, placed: Placed, plan: Plan) -> None:
        self.session, self.placed, self.plan = session, placed, plan
        self.at, self.watchers = -1, list[tuple[str, See]]()
        self.where = {name: (b.place, b.offset) for b in plan.buffers for name in b.tensors}
        self.works: dict[int, list[tuple[Place, int]]] = {}
        for b in plan.buffers:
            if b.category == "workspace":
                self.works.setdefault(b.start, []).append((b.place, b.offset))
        used = {b.space: b for b in (*placed.home.values(), *(s.backend for s in placed.steps))}
        self.syncs = [backend.sync for backend in used.values()]
        updates = (i for i, s in enumerate(placed.steps) if s.op.writes and not s.op.repeatable)
        self.first_update = next(updates, len(placed.steps))
        self._bind()

    # ---- binding

    def _bind(self) -> None:
        self.generation, self.runs = self.session.generation, 0
        self.table: Table | None = None
        self.calls = [bound.run for bound in self._bound()]
        inputs = (t for t in self.placed.graph.leaves if t.kind == "input")
        self.inputs = {t.label: (self.placed.home[t], self._array(t), t.spec) for t in inputs}
        outputs = self.placed.graph.outputs.items()
        self.outputs = {name: (self.placed.home[t.base], self._array(t)) for name, t in outputs}

    def _bound(self) -> Iterator[Bound]:
        return (self._bind_step(i, step) for i, step in enumerate(self.placed.steps))

    def _bind_step(self, i: int, step: Step) -> Bound:
        names = self.placed.names
        results = tuple(
            None if names[t] not in self.where and not t.base.kind else self._array(t)
            for t in step.results
        )
        inputs = tuple(None if t is None else self._array(t) for t in step.inputs)
        attrs = dict(step.attrs)
        work = self._work(i, step)
        if work:
            attrs["work"] = work
        out = results if step.call.several and step.op is step.call.op else results[0]
        return Bound(step, results, inputs, work, partial(step.kernel.run, out, *inputs, **attrs))

    def _work(self, i: int, step: Step) -> tuple[Any, ...]:
        return tuple(
            step.backend.view(self.session.buffer(*place), offset, s, s.strides)
            for s, (place, offset) in zip(step.workspaces, self.works.get(i, ()), strict=True)
        )

    def _array(self, t: Tensor) -> Any:
        """The array of t, or of the leaf or storage that it is a view of."""
        if t.base.kind in ("weight", "state", "constant"):
            return self.session.array(t)
        backend = self.placed.home[t.base]
        place, offset = self.where[self.placed.names[t.base]]
        return backend.view(self.session.buffer(*place), offset + t.offset, t.spec, t.strides)

    # ---- running

    def watch(self, pattern: str, see: See) -> None:
        """Call `see(name, value)` whenever a step computes a tensor whose name matches the shell pattern."""
        self.watchers.append((pattern, see))

    def __call__(
        self, inputs: Mapping[str, Any] | None = None, *, stop: Stop = None, only: Names = None
    ) -> dict[str, np.ndarray]:
        """Run once. Outputs are copies: all, or these. `stop()` is called before each step; if true, raises Stopped.

        Raises RunError if inputs or weights are missing or another run is in progress. A step that fails after
        updates have begun leaves the session dirty: its leaves can no longer be read. Rows of a cache are no
        update: they can be written again.
        """
        with self.session.alone(), np.errstate(all="ignore"):
            self._prepare(inputs or {})
            on = flags() & CHECKS
            if on or self.watchers:
                observer = self._observer(on)
                self._guarded(observer.calls(), stop)
                observer.report()
            else:
                table = self.table if self.table and self.table.calls is self.calls else None
                self._guarded(self.calls, stop, table, only)
                self.runs += 1
                if self.runs == 1:
                    self.calls = repeated(self.placed, self.calls)
                    self.table = tabled(self.placed, self.calls)
            items = self.outputs.items()
            return {name: b.read(a) for name, (b, a) in items if only is None or name in only}

    def _observer(self, on: frozenset[str]) -> Observer:
        arenas = {a.place: self.session.buffer(*a.place) for a in self.plan.arenas}
        return Observer(self.placed, self.plan, [*self._bound()], arenas, self.watchers, on)

    def _run(self, calls: list[Run], stop: Stop, turns: Iterable[int]) -> None:
        for at in turns:
            if stop is not None and stop():
                raise Stopped(f"stopped before {self.placed.steps[at].op.name}")
            self.at = at
            replacement = calls[at]()
            if replacement is not None:
                calls[at] = replacement
        for sync in self.syncs:
            sync()

    def _guarded(
        self, calls: list[Run], stop: Stop, table: Table | None = None, only: Names = None
    ) -> None:
        try:
            count = table.needed(only) if table else len(calls)
            self._run(calls, stop, range(count) if table is None or stop else table.others(count))
        except BaseException as error:
            if self.at >= self.first_update:
                name = self.placed.steps[self.at].op.name
                self.session.dirty = f"{name} failed during the update: {error!r}"
            if isinstance(error, IndexError):
                call = self.placed.steps[self.at].call
                lines = [f"    {t.line(self.placed.names)}" for t in call.reads]
                raise IndexError("\n".join([f"{error}", f"  at {call.where}", *lines])) from None
            raise

    def _prepare(self, inputs: Mapping[str, Any]) -> None:
        self.at = -1
        if self.generation != self.session.generation:
            self._bind()
        if self.session.dirty:
            raise RunError(f"the session is dirty: {self.session.dirty}")
        if inputs.keys() != self.inputs.keys():
            missing = sorted(self.inputs.keys() - inputs.keys()) or "none"
            unknown = sorted(inputs.keys() - self.inputs.keys()) or "none"
            raise RunError(f"inputs missing: {missing}; unknown: {unknown}")
        if not self.runs and (unset := self.session.unset(self.placed)):
            raise RunError(f"weights without a value: {', '.join(unset)}")
        for name, (backend, array, spec) in self.inputs.items():
            backend.write(array, fitting(name, inputs[name], spec))

    def diagnose(self, inputs: Mapping[str, Any]) -> str | None:
        """Run again without updates; returns which step first computes a non-finite value, or None."""
        with self.session.alone(), np.errstate(all="ignore"):
            self._prepare(inputs)
            try:
                for call in self._observer(frozenset(["nan"])).calls(updates=False):
                    call()
            except FloatingPointError as error:
                return str(error)
        return None
