"""Lifetimes: which tensors share bytes, and during which steps they are needed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from packtrain.place import Placed, Step
from packtrain.tensor import Tensor


@dataclass(slots=True, eq=False)
class Storage:
    """Bytes that a chain of tensors uses one after another, needed during steps [start, end)."""

    name: str
    op: str
    category: str
    space: str
    nbytes: int
    start: int
    end: int
    tensors: list[Tensor] = field(default_factory=list)


def storages(placed: Placed, space: str | None = None, *, reuse: bool = True) -> list[Storage]:
    """The storages of an arena, or of all: inputs, results and workspaces. Weights, states, constants are elsewhere.

    reuse  False: no in-place operations
    """
    found = _storages(placed, reuse)
    return found if space is None else [s for s in found if s.space == space]


def _storages(placed: Placed, reuse: bool) -> list[Storage]:
    last = _last_reads(placed)
    outputs = {t.base for t in placed.graph.outputs.values()}
    found: dict[Tensor, Storage] = {}
    result = [_input(placed, leaf, last) for leaf in placed.graph.leaves if leaf.kind == "input"]
    found.update((s.tensors[0], s) for s in result)
    for i, step in enumerate(placed.steps):
        for spec in step.workspaces:
            name = f"{placed.names[step.results[0]]} work"
            result.append(
                Storage(name, step.op.name, "workspace", step.backend.space, spec.nbytes, i, i + 1)
            )
        taken: set[Storage] = set()
        for index, t in enumerate(step.results):
            if t.base.kind or (t not in last and index in step.op.optional):
                continue
            storage = _dying(step, index, i, found, taken) if reuse else None
            if storage is None:
                storage = Storage(
                    placed.names[t],
                    step.op.name,
                    _category(step, t, outputs),
                    step.backend.space,
                    t.spec.nbytes,
                    i,
                    i + 1,
                )
                result.append(storage)
            taken.add(storage)
            storage.tensors.append(t)
            storage.end = max(last.get(t, i) + 1, i + 1)
            found[t] = storage
    return result


def columns(of: Sequence[Storage], alignment: int) -> tuple[npt.NDArray[np.int64], ...]:
    """Start, end and size of each storage; sizes are multiples of the alignment."""
    sizes = [max(-(-s.nbytes // alignment), 1) * alignment for s in of]
    rows = [s.start for s in of], [s.end for s in of], sizes
    return tuple(np.array(row, np.int64) for row in rows)


def _last_reads(placed: Placed) -> dict[Tensor, int]:
    """For each storage-owning tensor the last step that reads it; outputs are read after the last step."""
    last = {t.base: i for i, step in enumerate(placed.steps) for t in step.reads}
    last.update((t.base, len(placed.steps)) for t in placed.graph.outputs.values())
    return last


def _input(placed: Placed, leaf: Tensor, last: dict[Tensor, int]) -> Storage:
    space = placed.home[leaf].space
    return Storage(leaf.label, "input", "input", space, leaf.spec.nbytes, 0, last[leaf] + 1, [leaf])


def _category(step: Step, t: Tensor, outputs: set[Tensor]) -> str:
    if t in outputs:
        return "output"
    return {"forward": "activation", "backward": "gradient", "recomputed": "recomputed"}[
        step.call.phase
    ]


def _dying(
    step: Step, index: int, i: int, found: dict[Tensor, Storage], taken: set[Storage]
) -> Storage | None:
    """The storage of an input that result `index` may reuse: last read here, once, whole and dense."""
    result = step.results[index]
    reads = [t.base for t in step.reads]
    for candidate in step.op.inplace.get(index, ()):
        t = step.inputs[candidate]
        storage = None if t is None else found.get(t.base)
        if t is None or storage is None or storage in taken or storage.end != i + 1:
            continue
        whole = (
            t.dense
            and t.offset == 0
            and t.spec == result.spec
            and t.spec.nbytes == t.base.spec.nbytes
        )
        if whole and storage.nbytes == result.spec.nbytes and reads.count(t.base) == 1:
            return storage
    return None
