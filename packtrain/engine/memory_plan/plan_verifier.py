"""Replays a plan step by step and tracks which tensor owns each byte.

This module shares no code with the planner and trusts neither lifetimes nor offsets.
"""

import numpy as np

from packtrain.engine.memory_plan.memory_plan import ArenaKey, Buffer, Plan
from packtrain.engine.placement import Placed
from packtrain.engine.step import BEGIN_COPY, FINISH_COPY, KernelStep
from packtrain.engine.tensor import Tensor

Extent = tuple[ArenaKey, int, int]  # arena, first unit, unit after the last
Extents = list[Extent]
FREE_OWNER, WORKSPACE_OWNER = 0, 1


class PlanError(AssertionError):
    """Raised for a plan with which a run would read or overwrite wrong bytes."""


def verify(plan: Plan, placed: Placed) -> None:
    """Raise PlanError unless every read of a run sees the bytes that were written for it. Checked at each step: inputs
    are still whole; results and workspace lie inside the arena, aligned, apart from each other and from the inputs,
    unless the op may overwrite that input and it is not read later. Steps between two barriers may run in parallel: no
    step touches what another writes, unless one needs the other's result."""
    plan.check_belongs(placed)
    _PlanReplay(plan, placed).run()


class _PlanReplay:
    def __init__(self, plan: Plan, placed: Placed) -> None:
        self.placed = placed
        self.units = {b.space: b.alignment for b in placed.home.values()}
        self.buffer_of = {name: b for b in plan.buffers for name in b.tensors}
        self.works: dict[tuple[int, str], list[Buffer]] = {}
        for b in plan.buffers:
            if b.category == "workspace":
                self.works.setdefault((b.start, b.space), []).append(b)
        self.byte_owners = {
            a.place: np.zeros(-(-a.nbytes // self.units[a.space]), np.int64) for a in plan.arenas
        }
        self.group_ends = _barrier_ends(placed)
        self.concurrent_steps = ConcurrentSteps()
        self.owner_ids: dict[Tensor, int] = {}
        self.plan = plan
        self.travelling: dict[Tensor, Tensor] = {}  # copies under way -> their sources
        self.used: dict[Buffer, tuple[int, int]] = {}  # first write, one past the last use

    def run(self) -> None:
        """Check each step in turn, as if the run wrote names of tensors instead of values."""
        for leaf in self.placed.graph.leaves:
            if leaf.kind == "input":
                self._own_bytes(leaf)
                self._record_use(self._planned_buffer(leaf), 0)
        read_bases = {t.base for step in self.placed.steps for t in step.reads}
        read_bases |= {t.base for t in self.placed.graph.outputs.values()}
        for i, step in enumerate(self.placed.steps):
            for t in step.reads:
                self._check_not_overwritten(i, t, f"step {i} {step.op.name} reads")
            self._check_copies(i, step)
            self._check_results(i, step, read_bases)
            if self.placed.barriers is not None:
                self._check_concurrency(i, step, read_bases)
        for name, t in self.placed.graph.outputs.items():
            self._check_not_overwritten(len(self.placed.steps), t, f"output {name} reads")
        if self.travelling:
            raise PlanError(f"{', '.join(map(self._name, self.travelling))} never arrives")
        self._check_certificate()

    def _check_copies(self, step_index: int, step: KernelStep) -> None:
        """Raise PlanError if a step reads a copy that is still under way, or writes its source."""
        who, written_bases = f"step {step_index} {step.op.name}", {t.base for t in step.results}
        if step.op is FINISH_COPY and self.travelling.pop(step.reads[0], None) not in [
            t.base for t in step.reads[1:]
        ]:
            raise PlanError(f"{who}: {self._name(step.reads[0])} did not begin from its source")
        for t, source in self.travelling.items():
            if source in written_bases or any(x.base is t for x in step.reads):
                name = self._name(t)
                raise PlanError(f"{who} touches {name} or its source, before it has arrived")
        if step.op is BEGIN_COPY:
            self.travelling[step.results[0]] = step.reads[0].base

    def _check_results(self, i: int, step: KernelStep, read_bases: set[Tensor]) -> None:
        who = f"step {i} {step.op.name}"
        written_extents: list[tuple[str, Extent]] = []
        stored_results = [t for t in step.results if self._is_stored(step, t, read_bases)]
        for t in stored_results:
            extent = self._extent(t)
            for k, x in enumerate(step.inputs):
                if x is None or not _lies_in_arena(x) or not _overlap(extent, self._extent(x.base)):
                    continue
                if not (_may_overwrite(step, k, x, t) and extent == self._extent(x.base)):
                    overwritten = f"{self._name(t)} overwrites input {self._name(x)}"
                    raise PlanError(f"{who}: result {overwritten} while it is read")
            self._check_no_shared_bytes(who, self._name(t), extent, written_extents)
        for spec, b in self._workspace_extents(i, step):
            extent = self._arena_range(b)
            if b.nbytes < spec.nbytes:
                raise PlanError(f"{who}: workspace has {b.nbytes} bytes and needs {spec.nbytes}")
            for x in filter(_lies_in_arena, step.reads):
                if _overlap(extent, self._extent(x.base)):
                    raise PlanError(f"{who}: workspace overwrites input {self._name(x)}")
            self._check_no_shared_bytes(who, "workspace", extent, written_extents)
            self._record_use(b, i)
            self.byte_owners[extent[0]][extent[1] : extent[2]] = WORKSPACE_OWNER
        for t in stored_results:
            self._own_bytes(t)
            self._record_use(self._planned_buffer(t), i)

    def _check_concurrency(self, i: int, step: KernelStep, read_bases: set[Tensor]) -> None:
        """Raise PlanError if step i shares bytes with one since the last barrier, which may run at the same time;
        read_bases: the tensors that own what any step or output reads."""
        stored_results = [t for t in step.results if self._is_stored(step, t, read_bases)]
        write_extents = [self._extent(t) for t in stored_results]
        write_extents += [self._arena_range(b) for b in self.works.get((i, step.backend.space), [])]
        write_extents += [_leaf_extent(t) for t in step.results if t.base.kind]
        read_extents = [self._extent(t.base) for t in filter(_lies_in_arena, step.reads)]
        read_extents += [_leaf_extent(t) for t in step.reads if not _lies_in_arena(t)]
        other = self.concurrent_steps.add(i, step, read_extents, write_extents)
        if other is not None:
            raise PlanError(
                f"step {i} {step.op.name} and step {other} {self.placed.steps[other].op.name} share bytes, and no"
                " barrier is between them"
            )
        if i + 1 == self.group_ends[i]:
            self.concurrent_steps = ConcurrentSteps()

    def _is_stored(self, step: KernelStep, t: Tensor, read_bases: set[Tensor]) -> bool:
        """Whether a step's result t needs arena bytes: not a leaf, nor what is optional and not in `read_bases`."""
        is_needed = t.index not in step.op.optional or t in read_bases
        return not t.base.kind and (is_needed or self.placed.names[t] in self.buffer_of)

    def _workspace_extents(self, i: int, step: KernelStep):  # type: ignore[no-untyped-def]
        specs = step.workspaces
        buffers = self.works.get((i, step.backend.space), [])
        if len(buffers) != len(specs):
            counts = f"{len(buffers)} workspaces planned, {len(specs)} needed"
            raise PlanError(f"step {i} {step.op.name}: {counts}")
        return zip(specs, buffers, strict=True)

    def _check_no_shared_bytes(
        self, step_text: str, name: str, extent: Extent, written_extents: list[tuple[str, Extent]]
    ) -> None:
        for other_name, other_extent in written_extents:
            if _overlap(extent, other_extent):
                raise PlanError(f"{step_text}: {name} and {other_name} share bytes")
        written_extents.append((name, extent))

    def _own_bytes(self, t: Tensor) -> None:
        space, unit_start, unit_end = self._extent(t)
        self.owner_ids[t] = self.owner_ids.get(t, len(self.owner_ids) + WORKSPACE_OWNER + 1)
        self.byte_owners[space][unit_start:unit_end] = self.owner_ids[t]

    def _check_not_overwritten(self, i: int, t: Tensor, who: str) -> None:
        base = t.base
        if not _lies_in_arena(t):
            return
        self._record_use(self._planned_buffer(base), i)
        space, unit_start, unit_end = self._extent(base)
        owners = self.byte_owners[space][unit_start:unit_end]
        if base not in self.owner_ids or not (owners == self.owner_ids[base]).all():
            thieves = (x for x, k in self.owner_ids.items() if k in owners and x is not base)
            thief = next(map(self._name, thieves), "a workspace")
            raise PlanError(f"{who} {self._name(t)}, but its bytes were overwritten by {thief}")

    def _record_use(self, b: Buffer, i: int) -> None:
        """Record that step i uses buffer b, for the lifetimes that _check_certificate compares."""
        released = self.group_ends[i] if i < len(self.group_ends) else i + 1
        first_use, end_use = self.used.get(b, (i, released))
        self.used[b] = min(first_use, i), max(end_use, released)

    def _check_certificate(self) -> None:
        """Raise PlanError if the plan's lifetimes or lower bounds differ from those counted in this replay."""
        for b in self.plan.buffers:
            if self.used.get(b) != (b.start, b.end):
                planned = f"planned for steps [{b.start}, {b.end})"
                raise PlanError(f"{b.name}: {planned}, used in {self.used.get(b)}")
        for a in self.plan.arenas:
            alive, unit = [0] * (self.plan.steps + 2), self.units[a.space]
            arena_buffers = [b for b in self.plan.buffers if b.place == a.place]
            for b in arena_buffers:
                nbytes = max(-(-b.nbytes // unit), 1) * unit
                for i in range(b.start, b.end):
                    alive[i] += nbytes
            if (max(alive), alive.index(max(alive))) != (a.lower_bound, a.peak_step):
                planned = f"lower bound {a.lower_bound} at step {a.peak_step}"
                raise PlanError(f"{a.space}: {planned}, counted {max(alive)}")

    def _planned_buffer(self, t: Tensor) -> Buffer:
        buffer = self.buffer_of.get(self._name(t))
        if buffer is None:
            raise PlanError(f"{self._name(t)} has no bytes in the plan")
        return buffer

    def _extent(self, t: Tensor) -> Extent:
        """Return (arena, first unit, end) of the bytes of t, in units of the alignment."""
        buffer = self._planned_buffer(t)
        if buffer.nbytes < t.spec.nbytes:
            raise PlanError(f"{self._name(t)} has {buffer.nbytes} bytes and needs {t.spec.nbytes}")
        return self._arena_range(buffer)

    def _arena_range(self, b: Buffer) -> Extent:
        """Return a buffer's range in an arena, in units of the alignment; raise PlanError if it lies outside."""
        unit = self.units[b.space]
        unit_start, unit_end = b.offset // unit, -(-(b.offset + b.nbytes) // unit)
        if b.place not in self.byte_owners:
            raise PlanError(f"{b.name}: the plan has no arena {b.arena} on {b.space}")
        if b.offset % unit or b.offset < 0 or unit_end > len(self.byte_owners[b.place]):
            fact = f"offset {b.offset} is not a multiple of {unit} inside the arena"
            raise PlanError(f"{b.name}: {fact}")
        return b.place, unit_start, unit_end

    def _name(self, t: Tensor) -> str:
        return self.placed.names.get(t) or self.placed.names[t.base]


class ConcurrentSteps:
    """The steps since a barrier, which may run in parallel: bytes each reads and writes, and which results it needs."""

    def __init__(self) -> None:
        self.step_extents: dict[int, tuple[Extents, Extents]] = {}
        self.needs: dict[int, set[int]] = {}
        self.producers: dict[Tensor, int] = {}

    def add(self, i: int, step: KernelStep, reads: Extents, writes: Extents) -> int | None:
        """Add step i with the ranges that it reads and writes; return an earlier step, by index, that may run at the
        same time although one of the two writes what the other uses, or None."""
        direct = {self.producers[t.handle] for t in step.reads if t.handle in self.producers}
        self.needs[i] = direct.union(*(self.needs[k] for k in direct))
        for k, (earlier_reads, written) in self.step_extents.items():
            if k not in self.needs[i] and (
                _any_overlap(writes, [*earlier_reads, *written]) or _any_overlap(reads, written)
            ):
                return k
        self.step_extents[i] = reads, writes
        self.producers.update(dict.fromkeys(step.results, i))
        return None


def _barrier_ends(placed: Placed) -> list[int]:
    """Return, by step, the number of steps before the next barrier; steps of equal numbers may run in parallel."""
    num_steps = len(placed.steps)
    stops = set(range(num_steps + 1) if placed.barriers is None else placed.barriers) | {num_steps}
    end_steps, group_end = [0] * num_steps, num_steps
    for i in reversed(range(num_steps)):
        group_end = i + 1 if i + 1 in stops else group_end
        end_steps[i] = group_end
    return end_steps


def _leaf_extent(t: Tensor) -> Extent:
    """Return a range that stands for all bytes of a leaf, as if it were an arena of its own."""
    return ("leaf", t.base.label), 0, 1


def _any_overlap(extents: Extents, other_extents: Extents) -> bool:
    return any(_overlap(a, b) for a in extents for b in other_extents)


def _lies_in_arena(t: Tensor) -> bool:
    return t.base.kind in (None, "input")


def _overlap(a: Extent, b: Extent) -> bool:
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2]


def _may_overwrite(step: KernelStep, input_index: int, input: Tensor, result: Tensor) -> bool:
    """Whether the op lets `result` overwrite its input number input_index, `input`: dense, whole and read only once."""
    is_same_layout = input.spec == result.spec and input.dense and input.offset == 0
    is_read_once = sum(r.base is input.base for r in step.reads) == 1
    return input_index in step.op.inplace.get(result.index, ()) and is_same_layout and is_read_once
