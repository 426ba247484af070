"""Replays a plan step by step and tracks which tensor owns each byte.

It shares no code with the planner: neither lifetimes nor offsets are trusted.
"""

import numpy as np

from packtrain.engine.memory_plan.memory_plan import Buffer, Place, Plan
from packtrain.engine.placement import Placed
from packtrain.engine.step import ARRIVE, BEGIN, Step
from packtrain.engine.tensor import Tensor

Extent = tuple[Place, int, int]  # arena, first unit, unit after the last
FREE, WORK = 0, 1


class PlanError(AssertionError):
    """A plan with which a run would read or overwrite wrong bytes."""


def verify(plan: Plan, placed: Placed) -> None:
    """Raise PlanError unless every read of a run sees the bytes that were written for it.

    Checked at each step: inputs are still whole; results and workspace lie inside the arena, aligned, apart from
    each other and from the inputs, unless the op may overwrite that input and it is not read later. Steps between two
    barriers may run side by side: what one writes no other touches, unless one needs the other's result.
    """
    plan.check_belongs(placed)
    _Replay(plan, placed).run()


class _Replay:
    def __init__(self, plan: Plan, placed: Placed) -> None:
        self.placed = placed
        self.units = {b.space: b.alignment for b in placed.home.values()}
        self.where = {name: b for b in plan.buffers for name in b.tensors}
        self.works: dict[tuple[int, str], list[Buffer]] = {}
        for b in plan.buffers:
            if b.category == "workspace":
                self.works.setdefault((b.start, b.space), []).append(b)
        self.owner = {
            a.place: np.zeros(-(-a.nbytes // self.units[a.space]), np.int64) for a in plan.arenas
        }
        self.ends = _group_ends(placed)
        self.side = Beside()
        self.ids: dict[Tensor, int] = {}
        self.plan = plan
        self.travelling: dict[Tensor, Tensor] = {}  # copies that have begun, and their sources
        self.used: dict[Buffer, tuple[int, int]] = {}  # first write, one past the last use

    def run(self) -> None:
        for leaf in self.placed.graph.leaves:
            if leaf.kind == "input":
                self._own(leaf)
                self._use(self._buffer(leaf), 0)
        read = {t.base for step in self.placed.steps for t in step.reads}
        read |= {t.base for t in self.placed.graph.outputs.values()}
        for i, step in enumerate(self.placed.steps):
            for t in step.reads:
                self._check_whole(i, t, f"step {i} {step.op.name} reads")
            self._check_travelling(i, step)
            self._write(i, step, read)
            if self.placed.barriers is not None:
                self._check_beside(i, step, read)
        for name, t in self.placed.graph.outputs.items():
            self._check_whole(len(self.placed.steps), t, f"output {name} reads")
        if self.travelling:
            raise PlanError(f"{', '.join(map(self._name, self.travelling))} never arrives")
        self._check_certificate()

    def _check_travelling(self, i: int, step: Step) -> None:
        """Until a copy has arrived, nobody reads it or writes its source; their bytes are checked when it does."""
        who, written = f"step {i} {step.op.name}", {t.base for t in step.results}
        if step.op is ARRIVE and self.travelling.pop(step.reads[0], None) not in [
            t.base for t in step.reads[1:]
        ]:
            raise PlanError(f"{who}: {self._name(step.reads[0])} did not begin from its source")
        for t, source in self.travelling.items():
            if source in written or any(x.base is t for x in step.reads):
                raise PlanError(
                    f"{who} touches {self._name(t)} or its source, before it has arrived"
                )
        if step.op is BEGIN:
            self.travelling[step.results[0]] = step.reads[0].base

    def _write(self, i: int, step: Step, read: set[Tensor]) -> None:
        who = f"step {i} {step.op.name}"
        written: list[tuple[str, Extent]] = []
        stored = [t for t in step.results if self._is_stored(step, t, read)]
        for t in stored:
            extent = self._extent(t)
            for k, x in enumerate(step.inputs):
                if x is None or not _in_arena(x) or not _overlap(extent, self._extent(x.base)):
                    continue
                if not (_may_overwrite(step, k, x, t) and extent == self._extent(x.base)):
                    name = self._name(x)
                    raise PlanError(
                        f"{who}: result {self._name(t)} overwrites input {name} while it is read"
                    )
            self._check_apart(who, self._name(t), extent, written)
        for spec, b in self._workspace(i, step):
            extent = self._clip(b)
            if b.nbytes < spec.nbytes:
                raise PlanError(f"{who}: workspace has {b.nbytes} bytes and needs {spec.nbytes}")
            for x in filter(_in_arena, step.reads):
                if _overlap(extent, self._extent(x.base)):
                    raise PlanError(f"{who}: workspace overwrites input {self._name(x)}")
            self._check_apart(who, "workspace", extent, written)
            self._use(b, i)
            self.owner[extent[0]][extent[1] : extent[2]] = WORK
        for t in stored:
            self._own(t)
            self._use(self._buffer(t), i)

    def _check_beside(self, i: int, step: Step, read: set[Tensor]) -> None:
        """Check a step against those before it since the last barrier, which may run at the same time."""
        stored = [t for t in step.results if self._is_stored(step, t, read)]
        writes = [self._extent(t) for t in stored]
        writes += [self._clip(b) for b in self.works.get((i, step.backend.space), [])]
        writes += [_leaf_extent(t) for t in step.results if t.base.kind]
        reads = [self._extent(t.base) for t in filter(_in_arena, step.reads)]
        reads += [_leaf_extent(t) for t in step.reads if not _in_arena(t)]
        other = self.side.add(i, step, reads, writes)
        if other is not None:
            raise PlanError(
                f"step {i} {step.op.name} and step {other} {self.placed.steps[other].op.name} share bytes, and no"
                " barrier is between them"
            )
        if i + 1 == self.ends[i]:
            self.side = Beside()

    def _is_stored(self, step: Step, t: Tensor, read: set[Tensor]) -> bool:
        """Whether a result needs bytes of the arena: not a leaf's handle, nor an optional one that is not read."""
        left_out = (
            t.index in step.op.optional and t not in read and self.placed.names[t] not in self.where
        )
        return not t.base.kind and not left_out

    def _workspace(self, i: int, step: Step):  # type: ignore[no-untyped-def]
        specs = step.workspaces
        buffers = self.works.get((i, step.backend.space), [])
        if len(buffers) != len(specs):
            raise PlanError(
                f"step {i} {step.op.name}: {len(buffers)} workspaces planned, {len(specs)} needed"
            )
        return zip(specs, buffers, strict=True)

    def _check_apart(
        self, who: str, name: str, extent: Extent, written: list[tuple[str, Extent]]
    ) -> None:
        for other, other_extent in written:
            if _overlap(extent, other_extent):
                raise PlanError(f"{who}: {name} and {other} share bytes")
        written.append((name, extent))

    def _own(self, t: Tensor) -> None:
        space, first, last = self._extent(t)
        self.ids[t] = self.ids.get(t, len(self.ids) + WORK + 1)
        self.owner[space][first:last] = self.ids[t]

    def _check_whole(self, i: int, t: Tensor, who: str) -> None:
        base = t.base
        if not _in_arena(t):
            return
        self._use(self._buffer(base), i)
        space, first, last = self._extent(base)
        owners = self.owner[space][first:last]
        if base not in self.ids or not (owners == self.ids[base]).all():
            thief = next(
                (self._name(x) for x, k in self.ids.items() if k in owners and x is not base),
                "a workspace",
            )
            raise PlanError(f"{who} {self._name(t)}, but its bytes were overwritten by {thief}")

    def _use(self, b: Buffer, i: int) -> None:
        released = self.ends[i] if i < len(self.ends) else i + 1
        first, end = self.used.get(b, (i, released))
        self.used[b] = min(first, i), max(end, released)

    def _check_certificate(self) -> None:
        """Check the plan's lifetimes, arena sizes and lower bounds against this replay."""
        for b in self.plan.buffers:
            if self.used.get(b) != (b.start, b.end):
                raise PlanError(
                    f"{b.name}: planned for steps [{b.start}, {b.end}), used in {self.used.get(b)}"
                )
        for a in self.plan.arenas:
            alive, unit = [0] * (self.plan.steps + 2), self.units[a.space]
            arena_buffers = [b for b in self.plan.buffers if b.place == a.place]
            for b in arena_buffers:
                nbytes = max(-(-b.nbytes // unit), 1) * unit
                for i in range(b.start, b.end):
                    alive[i] += nbytes
            if (max(alive), alive.index(max(alive))) != (a.lower_bound, a.peak_step):
                raise PlanError(
                    f"{a.space}: lower bound {a.lower_bound} at step {a.peak_step}, counted {max(alive)}"
                )

    def _buffer(self, t: Tensor) -> Buffer:
        buffer = self.where.get(self._name(t))
        if buffer is None:
            raise PlanError(f"{self._name(t)} has no bytes in the plan")
        return buffer

    def _extent(self, t: Tensor) -> Extent:
        buffer = self._buffer(t)
        if buffer.nbytes < t.spec.nbytes:
            raise PlanError(f"{self._name(t)} has {buffer.nbytes} bytes and needs {t.spec.nbytes}")
        return self._clip(buffer)

    def _clip(self, b: Buffer) -> Extent:
        unit = self.units[b.space]
        first, last = b.offset // unit, -(-(b.offset + b.nbytes) // unit)
        if b.place not in self.owner:
            raise PlanError(f"{b.name}: the plan has no arena {b.arena} on {b.space}")
        if b.offset % unit or b.offset < 0 or last > len(self.owner[b.place]):
            raise PlanError(
                f"{b.name}: offset {b.offset} is not a multiple of {unit} inside the arena"
            )
        return b.place, first, last

    def _name(self, t: Tensor) -> str:
        return self.placed.names.get(t) or self.placed.names[t.base]


class Beside:
    """The steps since a barrier: what each reads and writes, and which results it needs, directly or not."""

    def __init__(self) -> None:
        self.touched: dict[int, tuple[list[Extent], list[Extent]]] = {}
        self.needs: dict[int, set[int]] = {}
        self.made: dict[Tensor, int] = {}

    def add(self, i: int, step: Step, reads: list[Extent], writes: list[Extent]) -> int | None:
        """Add a step; returns an earlier one with which it is in conflict."""
        direct = {self.made[t.handle] for t in step.reads if t.handle in self.made}
        self.needs[i] = direct.union(*(self.needs[k] for k in direct))
        for k, (read, written) in self.touched.items():
            if k not in self.needs[i] and (
                _any_overlap(writes, [*read, *written]) or _any_overlap(reads, written)
            ):
                return k
        self.touched[i] = reads, writes
        self.made.update(dict.fromkeys(step.results, i))
        return None


def _group_ends(placed: Placed) -> list[int]:
    """For each step, the number of steps up to the next barrier."""
    count = len(placed.steps)
    stops = set(range(count + 1) if placed.barriers is None else placed.barriers) | {count}
    end_steps, end = [0] * count, count
    for i in reversed(range(count)):
        end = i + 1 if i + 1 in stops else end
        end_steps[i] = end
    return end_steps


def _leaf_extent(t: Tensor) -> Extent:
    """All of a leaf, as an arena of its own."""
    return ("leaf", t.base.label), 0, 1


def _any_overlap(extents: list[Extent], other_extents: list[Extent]) -> bool:
    return any(_overlap(a, b) for a in extents for b in other_extents)


def _in_arena(t: Tensor) -> bool:
    return t.base.kind in (None, "input")


def _overlap(a: Extent, b: Extent) -> bool:
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2]


def _may_overwrite(step: Step, k: int, x: Tensor, t: Tensor) -> bool:
    """Whether the op allows t over its input k, and x is that whole input, read once."""
    is_same_layout = x.spec == t.spec and x.dense and x.offset == 0
    is_read_once = sum(r.base is x.base for r in step.reads) == 1
    return k in step.op.inplace.get(t.index, ()) and is_same_layout and is_read_once
