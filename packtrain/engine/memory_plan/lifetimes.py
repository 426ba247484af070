"""Lifetimes: which tensors share bytes, and during which steps they are needed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from packtrain.engine.placement import Placed
from packtrain.engine.step import Step
from packtrain.engine.tensor import Tensor


@dataclass(slots=True, eq=False)
class Storage:
    """Bytes that a chain of tensors uses one after another, needed during steps [start, end) in an arena of a space."""

    name: str
    op: str
    category: str
    space: str
    nbytes: int
    start: int
    end: int
    arena: str = ""
    tensors: list[Tensor] = field(default_factory=list)


def in_one(name: str) -> str:
    """The arena of a tensor where a space has one: it has no name."""
    return ""


def storages(
    placed: Placed,
    space: str | None = None,
    *,
    reuse: bool = True,
    arena_of: Callable[[str], str] = in_one,
) -> list[Storage]:
    """The storages of a space, or of all: inputs, results and workspaces. Weights, states, constants are elsewhere.

    reuse     False: no in-place operations
    arena_of  the arena of a tensor or workspace, by name
    """
    every_storage = _Lives(placed, reuse, arena_of).storages()
    return every_storage if space is None else [s for s in every_storage if s.space == space]


def _reads(placed: Placed) -> dict[Tensor, list[int]]:
    """For each storage-owning tensor the steps that read it, in order; outputs are read after the last step."""
    reading_steps: dict[Tensor, list[int]] = {}
    for i, step in enumerate(placed.steps):
        for t in step.reads:
            reading_steps.setdefault(t.base, []).append(i)
    for t in placed.graph.outputs.values():
        reading_steps.setdefault(t.base, []).append(len(placed.steps))
    return reading_steps


class _Lives:
    def __init__(self, placed: Placed, reuse: bool, arena_of: Callable[[str], str]) -> None:
        self.placed, self.reuse, self.arena_of = placed, reuse, arena_of
        self.outputs = {t.base for t in placed.graph.outputs.values()}
        self.found: dict[Tensor, Storage] = {}
        self.reads = _reads(placed)

    def storages(self) -> list[Storage]:
        placed, names = self.placed, self.placed.names
        result = [self._input(leaf) for leaf in placed.graph.leaves if leaf.kind == "input"]
        for i, step in enumerate(placed.steps):
            end, space = placed.released(i), step.backend.space
            if needed := step.workspaces:
                name = f"{names[step.results[0]]} work"
                together = self.arena_of(name)  # all workspaces of a step
                for spec in needed:
                    fields = name, step.op.name, "workspace", space, spec.nbytes, i, end
                    result.append(Storage(*fields, together))
            reused: set[Storage] = set()
            for index, t in enumerate(step.results):
                if t.base.kind or (t not in self.reads and index in step.op.optional):
                    continue
                arena = self.arena_of(names[t])
                storage = self._dying(step, index, i, reused, arena) if self.reuse else None
                if storage is None:
                    kind, nbytes = _category(step, t, self.outputs), t.spec.nbytes
                    storage = Storage(names[t], step.op.name, kind, space, nbytes, i, end, arena)
                    result.append(storage)
                reused.add(storage)
                storage.tensors.append(t)
                storage.end = max(placed.released(self._last(t, i)), end)
                self.found[t] = storage
        return result

    def _last(self, t: Tensor, i: int) -> int:
        """The last step that reads a storage-owning tensor; `i` if none does."""
        return self.reads[t][-1] if t in self.reads else i

    def _input(self, leaf: Tensor) -> Storage:
        space, end = self.placed.home[leaf].space, self.placed.released(self._last(leaf, 0))
        fields = leaf.label, "input", "input", space, leaf.spec.nbytes, 0, end
        self.found[leaf] = Storage(*fields, self.arena_of(leaf.label), [leaf])
        return self.found[leaf]

    def _dying(
        self, step: Step, index: int, i: int, reused: set[Storage], arena: str
    ) -> Storage | None:
        """The storage of an input that result `index` may reuse: last read here, once, whole and dense, and by no
        other step since a barrier, for that may run at the same time."""
        result, released = step.results[index], self.placed.released
        for candidate in step.op.inplace.get(index, ()):
            t = step.inputs[candidate]
            storage = None if t is None else self.found.get(t.base)
            if t is None or storage is None or storage in reused or storage.arena != arena:
                continue
            *before, last = self.reads[t.base][-2:]
            is_last_read = last == i and (not before or released(before[0]) <= i)
            is_same_layout = (
                t.dense
                and t.offset == 0
                and t.spec == result.spec
                and t.spec.nbytes == t.base.spec.nbytes
            )
            if is_same_layout and is_last_read and storage.nbytes == result.spec.nbytes:
                return storage
        return None


def columns(of: Sequence[Storage], alignment: int) -> tuple[npt.NDArray[np.int64], ...]:
    """Start, end and size of each storage; sizes are multiples of the alignment."""
    sizes = [max(-(-s.nbytes // alignment), 1) * alignment for s in of]
    rows = [s.start for s in of], [s.end for s in of], sizes
    return tuple(np.array(row, np.int64) for row in rows)


def _category(step: Step, t: Tensor, outputs: set[Tensor]) -> str:
    if t in outputs:
        return "output"
    return {"forward": "activation", "backward": "gradient", "recomputed": "recomputed"}[
        step.call.phase
    ]
