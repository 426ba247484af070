"""Quicker calls for the runs after the first.

Before the first run, backends reserve what kernels need; after it, they may record calls (see Backend.recorded_calls),
and compiled code calls kernels that have entries (see CompiledCallTable). A call from Python costs about a
microsecond, and a token makes about 190. Compiling one function per plan would take longer than many answers save.
"""

from array import array
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, cast

import numpy as np

from packtrain import kernels
from packtrain.common.debug import flags
from packtrain.engine.backends.host import HOST, Run, done_by_later_call
from packtrain.engine.memory_plan import ArenaKey
from packtrain.engine.placement import Placed
from packtrain.kernels.matmul.fused_products import join_calls
from packtrain.kernels.runtime import loader, machine_code


def replayable_calls(placed: Placed, calls: list[Run]) -> list[Run]:
    """Return the calls that later runs make instead of `calls`, which have run once: recorded where possible."""
    if "norecord" in flags():
        return calls
    remaining_calls, replayable = iter(calls), list[Run]()
    for backend, backend_steps in groupby(placed.steps, attrgetter("backend")):
        steps = list(backend_steps)
        backend_calls = list(islice(remaining_calls, len(steps)))
        replayable += backend.recorded_calls(map(attrgetter("op_call"), steps), backend_calls)
    return replayable


def reserve(placed_graphs: Iterable[Placed], arenas: Mapping[ArenaKey, tuple[int, Any]]) -> None:
    """Let backends allocate in advance what kernels of these graphs need, and pin host arenas that they copy."""
    steps = [step for placed in placed_graphs for step in placed.steps]
    for backend in {step.backend for step in steps}:
        backend.reserve(c for s in steps if s.backend is backend and (c := s.op_call) is not None)
        for (space, _), (_, buffer) in arenas.items() if backend.streams else ():
            if space == HOST:
                backend.lock_pages(buffer)


class CompiledCallTable:
    """Calls of a run that compiled code makes without Python: entries of kernels, and their arguments as words."""

    def __init__(self, placed: Placed, calls: Sequence[Run]) -> None:
        self.entry_rows, self._live_arguments = np.zeros((len(calls), 2), np.int64), list[Any]()
        self.calls, self._placed, self._counts = calls, placed, dict[tuple[str, ...], int]()
        self._has_recorded_calls = done_by_later_call in calls  # a recorded stretch must not be cut
        # the executor makes updates itself, as it must know which have begun
        raw_calls = [
            getattr(call, "unchecked", call) if step.op.repeatable or not step.op.writes else None
            for step, call in zip(placed.steps, calls, strict=True)
        ]
        for index, call in enumerate(raw_calls):
            self._add_compiled_call(index, call)
        for index, stop, merged_call in join_calls(raw_calls):
            self._add_compiled_call(index, merged_call)
            self.entry_rows[index + 1 : stop, 0] = loader.load("jit").DONE_BY_EARLIER_CALL

    def _add_compiled_call(self, index: int, call: Any) -> None:
        kernel_entry, kernel = machine_code.entered.get(getattr(call, "func", None), (0, None))
        if kernel is not None:
            argument_words = array("q", machine_code.arg_words(kernel, call.args))
            self.entry_rows[index] = kernel_entry, argument_words.buffer_info()[0]
            self._live_arguments += argument_words, call

    def num_needed_calls(self, only: Container[str] | None) -> int:
        """Return how many of the first calls compute all updates and the outputs in `only` (None: all outputs)."""
        graph = self._placed.graph
        output_names = tuple([name for name in graph.outputs if only is None or name in only])
        if output_names not in self._counts:
            output_bases = {graph.outputs[name].base for name in output_names}
            are_all_needed = self._has_recorded_calls
            call_counts = [
                i + 1
                for i, step in enumerate(self._placed.steps)
                if are_all_needed or step.op.writes or {t.base for t in step.results} & output_bases
            ]
            self._counts[output_names] = max(call_counts, default=0)
        return self._counts[output_names]

    def run_compiled_calls(self, num_calls: int) -> Iterator[int]:
        """Make the first `num_calls` calls by compiled code; yield the index of each that the caller must make."""
        index, call_module = 0, cast(Any, kernels.jit)
        run_all, done_mark = call_module.run_all, call_module.DONE_BY_EARLIER_CALL
        while (index := run_all(self.entry_rows, index, num_calls)) < num_calls:
            yield index
            index += 1
            while index < num_calls and self.entry_rows[index, 0] == done_mark:
                yield index
                index += 1


def make_table(placed: Placed, calls: Sequence[Run]) -> CompiledCallTable | None:
    """Return the table of compiled calls for later runs; None if compiled code can make none of `calls`."""
    call_table = None if "norecord" in flags() else CompiledCallTable(placed, calls)
    return call_table if call_table is not None and call_table.entry_rows[:, 0].any() else None
