"""Session and Executor: bind a plan to memory once, then run its kernels in order.

The Session owns the bytes: leaves by name, and one arena per space that all its plans share. An Executor owns no
memory; it lists calls with their arrays."""

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
from packtrain.common.mapped_file import page_budget
from packtrain.engine.backends import Backend, aligned
from packtrain.engine.instrumentation import CHECKS, BoundStep, Observer, Run, See, print_stages
from packtrain.engine.memory_plan import ArenaKey, Plan, make_plan
from packtrain.engine.page_window import PageWindow
from packtrain.engine.placement import Placed
from packtrain.engine.replayed_calls import CompiledCallTable, make_table, replayable_calls, reserve
from packtrain.engine.step import KernelStep
from packtrain.engine.tensor import Spec, Tensor
from packtrain.engine.value_checks import RunError as RunError
from packtrain.engine.value_checks import Stopped as Stopped
from packtrain.engine.value_checks import fitting

K = TypeVar("K")
StopCheck = Callable[[], bool] | None
Names = Container[str] | None
CallTable = CompiledCallTable | None


@dataclass(slots=True)
class _SessionLeaf:
    """Where a leaf (weight, state or constant) lives: a buffer of its backend, the offset there in bytes, its array."""

    spec: Spec
    backend: Backend
    has_value: bool
    buffer: Any = None
    offset: int = 0
    array: Any = None


class Session:
    """Owns the memory of graphs: leaves, allocated once by name, and arenas as large as the largest plan needs. Leaves
    of one graph, or of several `executors`, share a buffer per space. An executor that is added later may move the
    arena; one that needs more of a space than `limits` (bytes) is refused. Sessions may run at once, in threads."""

    def __init__(self, limits: Mapping[str, int] = MappingProxyType({})) -> None:
        self.limits, self.pages, self.generation = limits, page_budget.get(), 0
        self.dirty: str | None = None
        self._leaves: dict[str, _SessionLeaf] = {}
        self.shared: dict[str, np.ndarray] = {}
        self._constants: dict[Tensor, _SessionLeaf] = {}
        self._overlays: dict[str, tuple[str, int]] = {}
        self._arenas: dict[ArenaKey, tuple[int, Any]] = {}
        self._running = threading.Lock()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """`with session.exclusive():` keeps other runs out of this session; raises RunError if one is in progress."""
        if not self._running.acquire(blocking=False):
            problem = "another executor of this session is running; its arena has room for one"
            raise RunError(problem)
        try:
            yield
        finally:
            self._running.release()

    alone = exclusive  # its name in 0.1

    def share(self, values: Mapping[str, np.ndarray]) -> None:
        """Use these arrays, such as weights mapped from a file, as read-only leaves of these names. Arrays are copied
        only if they are not contiguous and aligned, or if the backend cannot read them."""
        for name in values.keys() & self._leaves.keys():
            raise RunError(f"{name} has its memory already; call share before creating executors")
        for name, value in values.items():
            self.shared[name] = np.require(value, requirements=["C", "A"]).view()
            self.shared[name].flags.writeable = False

    def overlay(self, parts: Mapping[str, tuple[str, int]]) -> None:
        """Let states lie in the bytes of other leaves: name of a state -> (name of a leaf, first element there)."""
        self._overlays.update(parts)

    def executor(self, placed: Placed, plan: Plan | None = None) -> "Executor":
        """Return an Executor that runs a placed graph in this session's memory by `plan`, else by a new plan (None)."""
        return self.executors({0: placed}, {} if plan is None else {0: plan})[0]

    def executors(
        self, placed: Mapping[K, Placed], plans: Mapping[K, Plan] | None = None
    ) -> dict[K, "Executor"]:
        """Return an Executor for each graph; allocates leaves and arenas together. Raises DoesNotFit over `limits`."""
        plan_map, reuse = plans or {}, "noreuse" not in flags()
        bound = {n: (p, plan_map.get(n) or make_plan(p, reuse=reuse)) for n, p in placed.items()}
        for graph, plan in bound.values():
            plan.check_belongs(graph)
            if excess_text := plan.beyond(self.limits):
                raise DoesNotFit(excess_text)
            for name in sorted(self.shared.keys() & graph.graph.written):
                self._writable_leaf(name)  # raises
            print_stages(graph, plan)
        self._allocate(placed.values())
        self._grow_arenas(bound.values())
        reserve(placed.values(), self._arenas)
        return {name: Executor(self, *graph) for name, graph in bound.items()}

    def _grow_arenas(self, bound_plans: Iterable[tuple[Placed, Plan]]) -> None:
        """Allocate arenas as large as the largest plan needs, at once: a smaller one first would be held beside it."""
        pairs = [(arena, placed) for placed, plan in bound_plans for arena in plan.arenas]
        for arena, placed in sorted(pairs, key=lambda pair: -pair[0].nbytes):  # the largest first
            if arena.nbytes > self._arenas.get(arena.place, (-1, None))[0]:
                backend = next(b for b in placed.home.values() if b.space == arena.space)
                self._arenas[arena.place] = arena.nbytes, backend.alloc(arena.nbytes)
                self.generation += 1

    def _allocate(self, graphs: Iterable[Placed]) -> None:
        """Allocate the leaves of graphs that this session lacks, in one buffer per memory space."""
        adopted = [self._adopt_leaf(leaf, p.home[leaf]) for p in graphs for leaf in p.graph.leaves]
        overlay_names = [name for name in self._overlays if name in self._leaves]
        overlay_ids = {id(self._leaves[name]) for name in overlay_names}
        waiting = (s for s in adopted if s and s.buffer is None and id(s) not in overlay_ids)
        new_leaves, space_nbytes = {id(leaf): leaf for leaf in waiting}.values(), dict[str, int]()
        for leaf in new_leaves:
            leaf.offset = space_nbytes.get(leaf.backend.space, 0)
            leaf_end = leaf.offset + aligned(leaf.spec.nbytes, leaf.backend.alignment)
            space_nbytes[leaf.backend.space] = leaf_end
        backends = {leaf.backend.space: leaf.backend for leaf in new_leaves}
        buffers = {space: backend.alloc(space_nbytes[space]) for space, backend in backends.items()}
        for leaf in new_leaves:
            leaf.buffer = buffers[leaf.backend.space]
        for name in overlay_names:
            parent_name, element_start = self._overlays[name]
            leaf, parent = self._leaves[name], self._leaves[parent_name]
            leaf.buffer, leaf.array = parent.buffer, None
            leaf.offset = parent.offset + leaf.spec.dtype.row_nbytes(element_start)
        every_leaf = (*self._leaves.values(), *self._constants.values())
        for leaf in [leaf for leaf in every_leaf if leaf.array is None]:
            leaf.array = leaf.backend.view(leaf.buffer, leaf.offset, leaf.spec, leaf.spec.strides)
        for t, constant in self._constants.items():
            if not constant.has_value and t.value is not None:
                constant.backend.write(constant.array, t.value)
                constant.has_value = True

    def _adopt_leaf(self, leaf: Tensor, backend: Backend) -> _SessionLeaf | None:
        """Return the session's record of a leaf, made if it is new; None for inputs, which are in arenas."""
        if leaf.kind == "constant":
            return self._constants.setdefault(leaf, _SessionLeaf(leaf.spec, backend, False))
        if leaf.kind not in ("weight", "state"):
            return None
        name = leaf.name or ""
        session_leaf, shared = self._leaves.get(name), self.shared.get(name)
        if session_leaf is None:
            has_value = shared is not None or leaf.kind == "state"
            session_leaf = self._leaves[name] = _SessionLeaf(leaf.spec, backend, has_value)
            if shared is not None:
                session_leaf.buffer = backend.share(fitting(name, shared, leaf.spec, "no"))
        elif session_leaf.spec != leaf.spec or session_leaf.backend.space != backend.space:
            fact = f"{session_leaf.spec} on {session_leaf.backend.space} in this session"
            raise RunError(f"{leaf.name} is {fact}, the graph wants {leaf.spec} on {backend.space}")
        return session_leaf

    def array(self, t: Tensor) -> Any:
        """Return the backend's array of a leaf, or of a view of a leaf, not a copy: runs change its values."""
        base = t.shared or t
        leaf = self._constants[base] if base.kind == "constant" else self._leaves[base.name or ""]
        place = leaf.buffer, leaf.offset + t.offset
        return leaf.array if t is base else leaf.backend.view(*place, t.spec, t.strides)

    def buffer(self, space: str, name: str = "") -> Any:
        """Return the memory (a backend's buffer) of the arena with this name in a memory space."""
        return self._arenas[space, name][1]

    def set(self, values: Mapping[str, np.ndarray]) -> None:
        """Write values to leaves by name; RunError if they do not fit. Setting all leaves cleans a dirty session."""
        for name, value in values.items():
            leaf = self._writable_leaf(name)
            leaf.backend.write(leaf.array, fitting(name, value, leaf.spec))
            leaf.has_value = True
        if {*values, *self.shared, *self._overlays} >= self._leaves.keys():
            self.dirty = None

    def fill(self, name: str, make: Callable[[np.ndarray], None]) -> None:
        """Let `make(array)` overwrite a leaf's value in place, with no temporary copy if the host can access it."""
        leaf = self._writable_leaf(name)
        spec, window = leaf.spec, leaf.backend.window(leaf.array)
        if window is not None:
            make(window)
        else:
            value = np.empty(spec.dtype.array_shape(spec.shape), spec.dtype.numpy)
            make(value)
            leaf.backend.write(leaf.array, value)
        leaf.has_value = True

    def get(self, name: str) -> np.ndarray:
        """Return a copy of a leaf's value. Raises RunError for an unknown name, and after an update that failed."""
        leaf = self._readable_leaf(name)
        return leaf.backend.read(leaf.array)

    def view(self, name: str) -> np.ndarray:
        """Return a read-only view of a leaf's value, or a copy if the host cannot access it. Raises as `get`."""
        leaf = self._readable_leaf(name)
        window = leaf.backend.window(leaf.array)
        array_view = leaf.backend.read(leaf.array) if window is None else window.view()
        array_view.flags.writeable = False
        return array_view

    def _readable_leaf(self, name: str) -> _SessionLeaf:
        """Return the record of a leaf. Raises RunError if none has this name or an update failed halfway."""
        if self.dirty:
            raise RunError(f"the session is dirty and must not be saved: {self.dirty}")
        return self._leaves.get(name) or self._existing_leaf(name)

    def _writable_leaf(self, name: str) -> _SessionLeaf:
        """Return the record of a leaf. Raises RunError if none has this name, and for a shared array."""
        if name in self.shared:
            raise RunError(f"{name} is a shared array; it cannot be changed here")
        return self._leaves.get(name) or self._existing_leaf(name)

    def _existing_leaf(self, name: str) -> _SessionLeaf:
        if name not in self._leaves:
            names = ", ".join(sorted(self._leaves)) or "none"
            raise RunError(f"no leaf is called {name}; there are {names}")
        return self._leaves[name]

    def unset(self, placed: Placed) -> list[str]:
        """Return the names of a graph's weights that never got a value."""
        weights = [leaf.name or "" for leaf in placed.graph.leaves if leaf.kind == "weight"]
        return [name for name in weights if not self._leaves[name].has_value]


class Executor:
    """A placed graph and its plan, bound to its session's memory: `executor(inputs)` returns the outputs by name.

    at    index of the step that runs, or ran last
    runs  number of complete runs since the arrays were bound
    """

    def __init__(self, session: Session, placed: Placed, plan: Plan) -> None:
        self.session, self.placed, self.plan = session, placed, plan
        self.at, self.watchers = -1, list[tuple[str, See]]()
        places = [((b.space, b.arena), b.offset, b.tensors) for b in plan.buffers]
        self.buffer_offsets = {n: (key, offset) for key, offset, names in places for n in names}
        self.works: dict[int, list[tuple[ArenaKey, int]]] = {}
        for b in plan.buffers:
            if b.category == "workspace":
                self.works.setdefault(b.start, []).append((b.place, b.offset))
        backends = (*placed.home.values(), *[s.backend for s in placed.steps])
        self.syncs = [*{b.space: b.sync for b in backends}.values()]
        updates = (i for i, s in enumerate(placed.steps) if s.op.writes and not s.op.repeatable)
        self.first_update = next(updates, len(placed.steps))
        self._bind_steps()

    # ---- binding

    def _bind_steps(self) -> None:
        self.generation, self.runs = self.session.generation, 0
        self.arenas = {a.place: self.session.buffer(*a.place) for a in self.plan.arenas}
        self.table: CallTable = None
        self.window = PageWindow.over(self.placed, self.session.shared, self.session.pages)
        self.calls = [bound_step.run for bound_step in self._bound_steps()]
        graph, home = self.placed.graph, self.placed.home
        inputs = [t for t in graph.leaves if t.kind == "input"]
        arrays = self._arrays([*inputs, *graph.outputs.values()])
        self.inputs = {t.label: (home[t], arrays[t], t.spec) for t in inputs}
        self.outputs = {n: (home[t.base], arrays[t]) for n, t in graph.outputs.items()}

    def _bound_steps(self) -> Iterator[BoundStep]:
        """Yield all steps with their arrays; a tensor has one array, whichever steps use it."""
        arrays = self._arrays([t for s in self.placed.steps for t in (*s.results, *s.reads)])
        for i, step in enumerate(self.placed.steps):
            results = tuple(map(arrays.get, step.results))
            inputs = tuple(map(arrays.get, step.inputs))
            workspace = self._workspace(i, step) if step.workspaces or i in self.works else ()
            attrs = {**step.attrs, "work": workspace} if workspace else step.attrs
            is_tuple = step.op is step.call.op and step.call.returns_tuple
            kernel_out = results if is_tuple else results[0]
            run: Run = partial(step.kernel.run, kernel_out, *inputs, **attrs)
            paged_run = self.window.before(i, step, inputs, run) if self.window else run
            yield BoundStep(step, results, inputs, workspace, paged_run)

    def _workspace(self, i: int, step: KernelStep) -> tuple[Any, ...]:
        pairs = zip(step.workspaces, self.works.get(i, ()), strict=True)
        return tuple([step.backend.view(self.arenas[k], at, s, s.strides) for s, (k, at) in pairs])

    def _arrays(self, tensors: Iterable[Tensor]) -> dict[Tensor | None, Any]:
        """Return {tensor: its array in a leaf or an arena}; results that nothing needs have none and are left out."""
        names, home, arrays = self.placed.names, self.placed.home, dict[Tensor | None, Any]()
        for t in tensors:
            base = t.shared or t
            if t in arrays:
                continue
            if base.kind in ("weight", "state", "constant"):
                arrays[t] = self.session.array(t)
            elif place := self.buffer_offsets.get(names[base]):
                buffer, offset = self.arenas[place[0]], place[1] + t.offset
                arrays[t] = home[base].view(buffer, offset, t.spec, t.strides)
        return arrays

    # ---- running

    def watch(self, pattern: str, on_value: See) -> None:
        """Call on_value(name, value), in later runs, for each computed tensor whose name matches the shell pattern."""
        self.watchers.append((pattern, on_value))

    def __call__(
        self, inputs: Mapping[str, Any] | None = None, *, stop: StopCheck = None, only: Names = None
    ) -> dict[str, np.ndarray]:
        """Run once; return copies of all outputs, or of those in `only`. A true `stop()` before a step raises Stopped.
        Raises RunError if inputs or weights are missing or another run is in progress. A step that fails after updates
        have begun leaves the session dirty: its leaves can no longer be read. Rows of a cache do not count: they can be
        written again."""
        with self.session.exclusive(), np.errstate(all="ignore"):
            self._write_inputs(inputs or {})
            if self.window:
                self.window.begin_run()
            if (checks := flags() & CHECKS) or self.watchers:
                observer = self._make_observer(checks)
                self._run_or_mark_dirty(observer.calls(), stop)
                observer.print_op_times()
            else:
                call_table = self.table if self.table and self.table.calls is self.calls else None
                self._run_or_mark_dirty(self.calls, stop, call_table, None if self.window else only)
                self.runs += 1
                if self.window:  # all calls were made, so that it is known what is in memory
                    self.window.end_run()
                if self.runs == 1:
                    self.calls = replayable_calls(self.placed, self.calls)
                    self.table = make_table(self.placed, self.calls)
            items = self.outputs.items()
            return {name: b.read(a) for name, (b, a) in items if only is None or name in only}

    def repeat(self) -> None:
        """Run all steps again; the caller (row_tiles) has written the input arrays, and reads the output arrays."""
        self._run_calls(self.calls, None, range(len(self.calls)))

    def _make_observer(self, on: frozenset[str]) -> Observer:
        steps = [*self._bound_steps()]
        return Observer(self.placed, self.plan, steps, self.arenas, self.watchers, on)

    def _run_calls(self, calls: list[Run], stop: StopCheck, indices: Iterable[int]) -> None:
        for index in indices:
            if stop is not None and stop():
                raise Stopped(f"stopped before {self.placed.steps[index].op.name}")
            self.at = index
            calls[index] = calls[index]() or calls[index]  # a call may return a quicker one
        for sync in self.syncs:
            sync()

    def _run_or_mark_dirty(
        self, calls: list[Run], stop: StopCheck, table: CallTable = None, only: Names = None
    ) -> None:
        """Run calls; if one fails after updates have begun, mark the session as dirty. IndexErrors name the call."""
        try:
            num_calls = table.num_needed_calls(only) if table else len(calls)
            indices: Iterable[int] = range(num_calls)
            if table is not None and not stop:
                indices = table.run_compiled_calls(num_calls)
            self._run_calls(calls, stop, indices)
        except BaseException as error:
            if self.at >= self.first_update:
                op_name = self.placed.steps[self.at].op.name
                self.session.dirty = f"{op_name} failed during the update: {error!r}"
            if isinstance(error, IndexError):
                call = self.placed.steps[self.at].call
                lines = [f"    {t.line(self.placed.names)}" for t in call.reads]
                raise IndexError("\n".join([f"{error}", f"  at {call.location}", *lines])) from None
            raise

    def _write_inputs(self, inputs: Mapping[str, Any]) -> None:
        self.at = -1
        if self.generation != self.session.generation:
            self._bind_steps()
        if self.session.dirty:
            raise RunError(f"the session is dirty: {self.session.dirty}")
        if inputs.keys() != self.inputs.keys():
            missing = sorted(self.inputs.keys() - inputs.keys()) or "none"
            unknown = sorted(inputs.keys() - self.inputs.keys()) or "none"
            raise RunError(f"inputs missing: {missing}; unknown: {unknown}")
        if not self.runs and (unset := self.session.unset(self.placed)):
            raise RunError(f"weights without a value: {', '.join(unset)}")
        for name, (backend, array, spec) in self.inputs.items():
            value, dtype = np.asarray(inputs[name]), spec.dtype.numpy
            is_fitting = value.shape == spec.shape and value.dtype == dtype
            backend.write(array, value if is_fitting else fitting(name, value, spec))

    def diagnose(self, inputs: Mapping[str, Any]) -> str | None:
        """Run without updates; return a text that names the first step with a non-finite result, or None."""
        with self.session.exclusive(), np.errstate(all="ignore"):
            self._write_inputs(inputs)
            try:
                for call in self._make_observer(frozenset(["nan"])).calls(updates=False):
                    call()
            except FloatingPointError as error:
                return str(error)
        return None
