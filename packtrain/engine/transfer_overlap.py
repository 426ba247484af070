"""Copies between memories that run beside other steps: one step begins a copy, another waits for its end.

Source and copy keep their bytes in between, as the second step reads both. Each route from one memory to another
carries one copy at a time, so that little more memory is needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from packtrain.engine.backends import Backend
from packtrain.engine.graph import unique_name
from packtrain.engine.ops.shape import cont
from packtrain.engine.step import BEGIN_COPY, FINISH_COPY, KernelStep
from packtrain.engine.tensor import Kernel, Tensor
from packtrain.engine.transfers import move_array

# Most steps between the begin of a copy and its first reader, or after its source would be free. Begun as early as
# possible, all copies of a step would exist at once, and offloaded values would return before anything was saved.
AHEAD = 24


@dataclass(slots=True)
class _Transfer:
    """A copy that begins before step `begin_step` and has finished before `end_step`, in the written order."""

    step: KernelStep
    carrier: Backend
    begin_step: int
    end_step: int


def overlap_transfers(
    steps: Sequence[KernelStep], home: dict[Tensor, Backend], names: dict[Tensor, str]
) -> list[KernelStep]:
    """Split copies between memories into two steps, begin and finish, with other steps in between, where a backend
    copies beside its kernels; return all steps. Adds each copy under way to `home` and `names`."""
    transfers = _find_transfers(steps) if any(map(attrgetter("source"), steps)) else {}
    begins, arrivals = dict[int, list[KernelStep]](), dict[int, list[KernelStep]]()
    used_names = dict.fromkeys(names.values(), 1) if transfers else {}
    for transfer in transfers.values():
        copied_tensor, (source,) = transfer.step.results[0], transfer.step.reads
        under_way = cont(source)
        home[under_way] = transfer.step.backend
        names[under_way] = unique_name(f"{names[copied_tensor]} begun", used_names)
        begins.setdefault(transfer.begin_step, []).append(_make_begin_step(transfer, under_way))
        arrivals.setdefault(transfer.end_step, []).append(_make_finish_step(transfer, under_way))
    reordered = list[KernelStep]()
    for index in range(len(steps) + 1):
        reordered += [*arrivals.get(index, ()), *begins.get(index, ())]
        reordered += [steps[index]] if index < len(steps) and index not in transfers else []
    return reordered


def _find_transfers(steps: Sequence[KernelStep]) -> dict[int, _Transfer]:
    """Return copies to split, by step index, each as early and as late as values and other copies allow."""
    writing_steps, read = _touched([s.results for s in steps]), _touched([s.reads for s in steps])
    updates = [index for index, s in enumerate(steps) if s.op.writes]
    transfers, last_transfers = dict[int, _Transfer](), dict[tuple[str, str], _Transfer]()
    for at, step in enumerate(steps):
        # of the backends that can copy beside their kernels, the target comes before the source
        endpoints = () if step.source is None else (step.backend, step.source)
        carrier = next((backend for backend in endpoints if backend.streams), None)
        if carrier is None or step.source is None:
            continue
        source_base = step.reads[0].base
        is_stored = source_base.kind in ("weight", "state")  # these may share bytes, see overlay
        source_writes = updates if is_stored else writing_steps.get(source_base, [])
        begin_bounds = [*(w + 1 for w in source_writes if w < at), at - AHEAD, 0]
        begin_bounds += [transfers[w].end_step for w in source_writes if w in transfers]
        end_bounds = [*(r for r in read.get(step.results[0], ()) if r > at), len(steps), at + AHEAD]
        end_bounds += [at + 1] * is_stored
        transfer = _Transfer(step, carrier, max(begin_bounds), min(end_bounds))
        previous_transfer = last_transfers.get(route := (step.source.space, step.backend.space))
        if previous_transfer is not None:
            transfer.begin_step = max(transfer.begin_step, min(previous_transfer.end_step, at))
            previous_transfer.end_step = min(previous_transfer.end_step, transfer.begin_step)
        transfers[at] = last_transfers[route] = transfer
    return transfers


def _touched(tensor_groups: Sequence[Sequence[Tensor]]) -> Mapping[Tensor, list[int]]:
    """Return, by tensor that owns bytes, the indices of the groups that contain it or a view of it."""
    indices = dict[Tensor, list[int]]()
    for index, tensors in enumerate(tensor_groups):
        for t in tensors:
            indices.setdefault(t.base, []).append(index)
    return indices


def _make_begin_step(transfer: _Transfer, under_way: Tensor) -> KernelStep:
    carrier, step = transfer.carrier, transfer.step
    assert step.source is not None
    peer = step.source if carrier is step.backend else step.backend

    def begin(y: Any, x: Any) -> None:
        carrier.begin_copy(y, x, peer)

    return replace(step, op=BEGIN_COPY, kernel=Kernel(begin, strided=False), results=(under_way,))


def _make_finish_step(transfer: _Transfer, under_way: Tensor) -> KernelStep:
    carrier, step = transfer.carrier, transfer.step

    def arrive(y: Any, in_flight: Any, x: Any) -> None:
        carrier.wait_for_copies()  # on the host: either side may be host memory, whose kernels know no stream
        if not step.backend.overlap(y, in_flight):  # planned without reuse
            move_array(step.backend, y, step.backend, in_flight)

    kernel, inputs = Kernel(arrive, strided=False), (under_way, *step.inputs)
    return replace(step, op=FINISH_COPY, kernel=kernel, inputs=inputs, source=None)
