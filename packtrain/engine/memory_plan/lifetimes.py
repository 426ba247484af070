"""Lifetimes: which tensors share bytes, and during which steps these bytes are needed.

Bytes last read before a barrier are freed at the barrier, so that calls between two barriers may run in parallel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from packtrain.engine.placement import Placed
from packtrain.engine.step import KernelStep
from packtrain.engine.tensor import Tensor, spec_nbytes

# of results, by the phase of their call
CATEGORIES = {"forward": "activation", "backward": "gradient", "recomputed": "recomputed"}


@dataclass(slots=True, eq=False)
class Storage:
    """Bytes of an arena that tensors use one after another, each over the last, needed in steps [start, end)."""

    name: str
    op: str
    category: str
    space: str
    nbytes: int
    start: int
    end: int
    arena: str = ""
    tensors: list[Tensor] = field(default_factory=list)


def default_arena(name: str) -> str:
    """Return "", whatever the tensor: the name of a memory space's only arena."""
    return ""


def storage_lifetimes(
    placed: Placed, space: str | None = None, *, reuse: bool = True, arena_of: Callable[[str], str] = default_arena,
) -> list[Storage]:  # fmt: skip
    """Return what needs bytes in the arenas of a memory space (None: of all): inputs, results and workspaces.

    reuse     False: no result overwrites an input
    arena_of  returns the arena of a tensor or workspace by name
    """
    all_storages = _LifetimeAnalysis(placed, reuse, arena_of).storages()
    return all_storages if space is None else [s for s in all_storages if s.space == space]


def _reading_steps(placed: Placed) -> dict[Tensor, list[int]]:
    """Return, by tensor that owns bytes, the steps that read it, in order; the step after the last reads outputs."""
    reading_steps: dict[Tensor, list[int]] = {}
    for i, step in enumerate(placed.steps):
        for t in step.reads:
            reading_steps.setdefault(t.shared or t, []).append(i)
    for t in placed.graph.outputs.values():
        reading_steps.setdefault(t.base, []).append(len(placed.steps))
    return reading_steps


class _LifetimeAnalysis:
    def __init__(self, placed: Placed, reuse: bool, arena_of: Callable[[str], str]) -> None:
        self.placed, self.reuse, self.arena_of = placed, reuse, arena_of
        self.outputs = {t.base for t in placed.graph.outputs.values()}
        self.storage_of: dict[Tensor, Storage] = {}
        self.reading_steps = _reading_steps(placed)
        self.releases: Sequence[int] = range(1, len(placed.steps) + 2)
        if placed.barriers is not None:
            self.releases = [*map(placed.released, range(len(placed.steps) + 1))]

    def storages(self) -> list[Storage]:
        """Return all storages of the placed graph: those of inputs, then results and workspaces by step."""
        placed, names, releases = self.placed, self.placed.names, self.releases
        storage_list = [self._input(leaf) for leaf in placed.graph.leaves if leaf.kind == "input"]
        for i, step in enumerate(placed.steps):
            end, space, reading_steps = releases[i], step.backend.space, self.reading_steps
            if workspace_specs := step.workspaces:
                name = f"{names[step.results[0]]} work"
                workspace_arena = self.arena_of(name)  # all workspaces of a step
                for spec in workspace_specs:
                    fields = name, step.op.name, "workspace", space, spec.nbytes, i, end
                    storage_list.append(Storage(*fields, workspace_arena))
            reused: set[Storage] = set()
            for index, t in enumerate(step.results):
                if (t.shared or t).kind or (t not in reading_steps and index in step.op.optional):
                    continue
                arena = "" if self.arena_of is default_arena else self.arena_of(names[t])
                storage = None
                if step.op.inplace.get(index):
                    storage = self._reusable_storage(step, index, i, reused, arena)
                if storage is None:
                    nbytes = spec_nbytes(t.spec.shape, t.spec.dtype)
                    kind = "output" if t in self.outputs else CATEGORIES[step.call.phase]
                    storage = Storage(names[t], step.op.name, kind, space, nbytes, i, end, arena)
                    storage_list.append(storage)
                reused.add(storage)
                storage.tensors.append(t)
                storage.end = max(releases[reading_steps.get(t, (i,))[-1]], end)
                self.storage_of[t] = storage
        return storage_list

    def _input(self, leaf: Tensor) -> Storage:
        """Return the storage of an input leaf, alive from the start of the run to its last read."""
        last_read = self.reading_steps.get(leaf, (0,))[-1]
        space, end = self.placed.home[leaf].space, self.releases[last_read]
        fields = leaf.label, "input", "input", space, leaf.spec.nbytes, 0, end
        self.storage_of[leaf] = Storage(*fields, self.arena_of(leaf.label), [leaf])
        return self.storage_of[leaf]

    def _reusable_storage(
        self, step: KernelStep, index: int, i: int, reused: set[Storage], arena: str
    ) -> Storage | None:
        """Return the storage in `arena`, not in `reused`, of an input that result `index` of step i may overwrite, or
        None: last read here, whole and dense, and by no other step since a barrier, which may run at the same time."""
        result, released = step.results[index], self.placed.released
        for input_index in step.op.inplace.get(index, ()) if self.reuse else ():
            t = step.inputs[input_index]
            base = t and (t.shared or t)
            storage = None if base is None else self.storage_of.get(base)
            if t is None or base is None or storage is None or storage in reused:
                continue
            *earlier_reads, last_read = self.reading_steps[base][-2:]
            is_last_read = last_read == i and (not earlier_reads or released(earlier_reads[0]) <= i)
            is_same_layout = storage.arena == arena and t.spec == result.spec and t.dense
            # results take storage of their own size, so that a base is as large as its storage
            nbytes = spec_nbytes(t.spec.shape, t.spec.dtype)
            if is_same_layout and t.offset == 0 and nbytes == storage.nbytes and is_last_read:
                return storage
        return None


def lifetime_columns(of: Sequence[Storage], alignment: int) -> tuple[npt.NDArray[np.int64], ...]:
    """Return start step, end step and bytes of storages, int64 (N,) each; bytes are rounded up to the alignment."""
    aligned_nbytes = [max(-(-s.nbytes // alignment), 1) * alignment for s in of]
    column_lists = [s.start for s in of], [s.end for s in of], aligned_nbytes
    return tuple(np.array(column, np.int64) for column in column_lists)
