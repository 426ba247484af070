"""Keeps the resident pages of mapped weights within a limit, by a schedule made before the run.

A graph reads its weights in a known order, forward and back, run after run: pages that are read again soonest stay, the
rest is given back (Belady 1966), and what comes next is asked for ahead, but never in the place of a page that is read
before it (Cao et al. 1995). Rows of tables and experts, unknown until they are looked up, stay while there is room.

Worked example: three weights of 1 MiB, read in the order a b c c b a, in a window of 2 MiB. Before c is read, a goes,
as b is read sooner; when b has been read again, c goes and a comes back: a run reads 2 MiB from the file.
"""

import math
import mmap
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packtrain.common.mapped_file import FileRange, PageBudget, WindowTooSmall, mapped_file
from packtrain.engine.backends.host import HOST
from packtrain.engine.placement import Placed
from packtrain.engine.step import KernelStep
from packtrain.engine.tensor import Tensor

NUM_CYCLES = 3  # simulated runs, after which the pages at a run's end are those at its beginning
Reads = Sequence[Mapping[str, int]]  # of each step: bytes that it reads, by weight


@dataclass(slots=True)
class Turnover:
    """What happens before a step: weights leave memory or are read ahead; tables of which the last step read rows."""

    dropped: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    partly_read: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PageSchedule:
    """What is in memory when a run begins, and what changes before each step that is listed: at most `peak_nbytes`.

    loaded_nbytes  bytes of whole weights that a run reads from the file, besides looked-up rows
    row_nbytes     room for rows and experts that were looked up and may be again, beside the weights of any step
    """

    at_start: frozenset[str]
    turnovers: Mapping[int, Turnover]
    loaded_nbytes: int
    peak_nbytes: int
    row_nbytes: int


def smallest_window(reads: Reads) -> int:
    """Return the bytes of weights that the step that reads most of them reads: no smaller window is possible."""
    return max((sum(step.values()) for step in reads), default=0)


def page_schedule(reads: Reads, sizes: Mapping[str, int], limit: int) -> PageSchedule:
    """Plan which weights are in memory before each step of a run that is repeated. Raises DoesNotFit (WindowTooSmall).

    sizes  bytes of each weight; a step that reads fewer of them, such as rows of a table, does not ask for it ahead
    limit  most bytes in memory
    """
    if (required := smallest_window(reads)) > limit:
        raise WindowTooSmall(required - limit)
    used = {name: sizes[name] for step in reads for name in step}
    if sum(used.values()) <= limit:
        at_start = {n for step in reads for n, nbytes in step.items() if nbytes == sizes[n]}
        return PageSchedule(frozenset(at_start), {}, 0, sum(used.values()), 0)
    simulation = _Simulation(reads, sizes, limit)
    for _ in range(NUM_CYCLES):
        at_start = simulation.resident.keys() - simulation.partly_read
        turnovers = simulation.run()
    # the last run may have ended otherwise than it began
    first = turnovers.setdefault(0, Turnover())
    first.dropped += sorted(simulation.resident.keys() - at_start - {*simulation.partly_read})
    row_nbytes = limit - simulation.max_loaded_nbytes
    if row_nbytes < simulation.max_part_nbytes:
        row_nbytes = 0
        for turnover in turnovers.values():
            turnover.dropped += turnover.partly_read
    changed = {i: t for i, t in turnovers.items() if t.dropped or t.loaded or t.partly_read}
    loaded_nbytes = sum(sizes[name] for turnover in changed.values() for name in turnover.loaded)
    return PageSchedule(frozenset(at_start), changed, loaded_nbytes, limit, row_nbytes)


class _Simulation:
    """Plays a run's steps through, to choose which weights (`resident`, with their bytes) stay, leave and come."""

    def __init__(self, reads: Reads, sizes: Mapping[str, int], limit: int) -> None:
        self.reads, self.sizes, self.limit = reads, sizes, limit
        self.resident, self.resident_nbytes = dict[str, int](), 0
        self.partly_read = list[str]()  # by the last step: these leave before the next
        self.max_loaded_nbytes = self.max_part_nbytes = 0  # of whole weights, and of parts
        self.steps = [i for i, step in enumerate(reads) if step]
        self.uses: dict[str, list[int]] = defaultdict(list)
        for i in self.steps:
            for name in reads[i]:
                self.uses[name].append(i)

    def next_use(self, name: str, after: int) -> int:
        """Return the next step after `after` that reads a weight; steps of the next run count on."""
        uses = self.uses[name]
        place = bisect_right(uses, after)
        return uses[place] if place < len(uses) else uses[0] + len(self.reads)

    def run(self) -> dict[int, Turnover]:
        """Simulate a run; return, by step, the weights that leave memory or are read ahead before that step."""
        turnovers = dict[int, Turnover]()
        for place, step in enumerate(self.steps):
            turnover = turnovers[step] = Turnover()
            for name in self.partly_read:
                self.resident_nbytes -= self.resident.pop(name)
            turnover.partly_read, self.partly_read = self.partly_read, []
            # last those of which only a part is read: they may have to leave for the rest
            for name in sorted(self.reads[step], key=lambda name: self.reads_rows_only(name, step)):
                nbytes = self.reads[step][name]
                if name not in self.resident:
                    self.make_room(nbytes, step, step, turnover)
                    self.add_to_memory(name, nbytes, turnover)
            self.look_ahead(place, turnover)
            part_nbytes = sum(self.resident[name] for name in self.partly_read)
            self.max_part_nbytes = max(self.max_part_nbytes, part_nbytes)
            self.max_loaded_nbytes = max(self.max_loaded_nbytes, self.resident_nbytes - part_nbytes)
        return turnovers

    def look_ahead(self, place: int, turnover: Turnover) -> None:
        """Read ahead the weights of steps after steps[place], as long as there is room; add names to `turnover`."""
        step, num_steps = self.steps[place], len(self.steps)
        for later in range(place + 1, place + num_steps):
            next_step = self.steps[later % num_steps]
            use = next_step + later // num_steps * len(self.reads)
            for name, nbytes in self.reads[next_step].items():
                if name not in self.resident and not self.reads_rows_only(name, next_step):
                    if not self.make_room(nbytes, step, use, turnover):
                        return
                    self.add_to_memory(name, nbytes, turnover)

    def make_room(self, nbytes: int, step: int, use: int, turnover: Turnover) -> bool:
        """Drop weights whose next read is latest, noted in `turnover`, until `nbytes` for step `use` fit while `step`
        runs; return False if all that could go are read before `use`."""
        while self.resident_nbytes + nbytes > self.limit:
            waiting = self.resident.keys() - self.reads[step].keys()
            if not waiting and use == step:
                waiting = {name for name in self.resident if self.reads_rows_only(name, step)}
            victim = max(waiting, key=lambda name: (self.next_use(name, step), name), default=None)
            if victim is None or self.next_use(victim, step) <= use:
                return False
            self.remove_from_memory(victim, turnover)
        return True

    def reads_rows_only(self, name: str, step: int) -> bool:
        """Whether a step reads only some rows of a weight."""
        return self.reads[step].get(name, self.sizes[name]) < self.sizes[name]

    def add_to_memory(self, name: str, nbytes: int, turnover: Turnover) -> None:
        self.resident[name] = nbytes
        self.resident_nbytes += nbytes
        (turnover.loaded if nbytes == self.sizes[name] else self.partly_read).append(name)

    def remove_from_memory(self, name: str, turnover: Turnover) -> None:
        self.resident_nbytes -= self.resident.pop(name)
        turnover.dropped.append(name)


# ---- the files of a run --------------------------------------------------------------------------------------


# by op: its inputs that are a table and the numbers of rows to read
LOOKUPS = {"get_rows": (0, 1), "matmul_id": (1, 2), "matmul_id_back": (1, 2)}


class PageWindow:
    """Keeps the mapped weights of a placed graph within a budget of memory: what comes and goes before each step."""

    def __init__(self, placed: Placed, ranges: Mapping[str, FileRange], budget: PageBudget) -> None:
        self.ranges, self.budget = ranges, budget
        self.at_end = dict[FileRange, int]()
        self.sizes = {name: in_pages(stop - start) for name, (_, start, stop) in ranges.items()}
        self.reads = weight_reads(placed, self.sizes)
        self.schedule = page_schedule(self.reads, self.sizes, budget.nbytes)
        turnovers = self.schedule.turnovers.values() if self.schedule.row_nbytes else ()
        self.row_tables = {name for turnover in turnovers for name in turnover.partly_read}

    @classmethod
    def over(
        cls, placed: Placed, arrays: Mapping[str, np.ndarray], budget: PageBudget | None
    ) -> "PageWindow | None":
        """Return the window, within `budget`, of a graph whose weights are these mapped arrays; None without budget."""
        if budget is None:
            return None
        files = {name: mapped_file(array) for name, array in arrays.items()}
        ranges = {
            n: (file, *file.byte_range(arrays[n])) for n, file in files.items() if file is not None
        }
        return cls(placed, ranges, budget)

    def begin_run(self) -> None:
        """Make memory hold what the schedule begins with, if another graph ran last or this one did not end."""
        budget = self.budget
        for file in {file for file, *_ in self.ranges.values()}:
            budget.admit(file)
        if budget.user is not self:
            self._trim_rows(self.schedule.row_nbytes)
            at_start = {self.ranges[n]: self.sizes[n] for n in self.schedule.at_start}
            unneeded = {r: n for r, n in budget.resident.items() if r not in at_start}
            if sum(unneeded.values()) + self.schedule.peak_nbytes > budget.nbytes:
                for file, start, stop in unneeded:
                    file.release(start, stop)
                unneeded = {}
            for file, start, stop in at_start.keys() - budget.resident.keys():
                file.prefetch(start, stop)
            self.at_end = unneeded | at_start
        budget.user = None
        budget.resident = self.at_end | {r: self.sizes[n] for n, r in self.ranges.items()}

    def end_run(self) -> None:
        """Note that the schedule was followed to its end, so that the next run finds memory as planned."""
        self.budget.user, self.budget.resident = self, self.at_end

    def before(
        self, index: int, step: KernelStep, inputs: Sequence[Any], run: Callable[[], Any]
    ) -> Callable[[], Any]:
        """Return `run`, the call of step `index`, or a function that first reads and gives back pages as scheduled."""
        turnover = self.schedule.turnovers.get(index, Turnover())
        released = [self.ranges[name] for name in turnover.dropped]
        prefetched = [self.ranges[name] for name in turnover.loaded]
        looks_up = any(nbytes < self.sizes[name] for name, nbytes in self.reads[index].items())
        if not released and not prefetched and not looks_up:
            return run

        def turn_over_and_run() -> None:
            nonlocal run
            for file, start, stop in released:
                file.release(start, stop)
            for file, start, stop in prefetched:
                file.prefetch(start, stop)
            if looks_up:
                self._prefetch_rows(step, inputs)
            run = run() or run  # a call may return a quicker one

        return turn_over_and_run

    def _prefetch_rows(self, step: KernelStep, inputs: Sequence[Any]) -> None:
        """Read ahead the rows of a table, or the experts of a mixture, that a step looks up by one of its inputs."""
        place, id_place = LOOKUPS[step.op.name]
        table = step.reads[place]
        file, start, stop = self.ranges[table.base.label]
        row_nbytes = (stop - start) // table.shape[0]
        starts = [start + row * row_nbytes for row in np.unique(inputs[id_place]).tolist()]
        rows, present = {(file, at, at + row_nbytes): in_pages(row_nbytes) for at in starts}, set()
        if table.base.label in self.row_tables:
            present = {row for row in rows if self.budget.rows.pop(row, None)}
            self._trim_rows(self.schedule.row_nbytes - sum(rows.values()))
            self.budget.rows |= rows
        for _, at, end in (row for row in rows if row not in present):
            file.prefetch(at, end)

    def _trim_rows(self, limit: int) -> None:
        """Release rows, those that were looked up longest ago first, until the others have at most `limit` bytes."""
        excess_nbytes = sum(self.budget.rows.values()) - limit
        for row in [*self.budget.rows] if excess_nbytes > 0 else ():
            file, start, stop = row
            file.release(start, stop)
            excess_nbytes -= self.budget.rows.pop(row)
            if excess_nbytes <= 0:
                break


def in_pages(nbytes: int) -> int:
    """Return the bytes of memory pages that `nbytes` of a file may touch."""
    return nbytes + 2 * mmap.PAGESIZE


def weight_reads(placed: Placed, sizes: Mapping[str, int]) -> Reads:
    """Return, by step of a graph, the bytes that it reads of each weight in `sizes`."""
    return [
        {t.base.label: nbytes for t in step.reads if (nbytes := _read_nbytes(step, t, sizes))}
        for step in placed.steps
    ]


def _read_nbytes(step: KernelStep, t: Tensor, sizes: Mapping[str, int]) -> int:
    """Return how many bytes of weight t a step reads: all, or those of the rows or experts that it looks up."""
    if t.base.kind != "weight" or step.backend.space != HOST:
        return 0
    nbytes, (table, ids) = sizes.get(t.base.label, 0), LOOKUPS.get(step.op.name, (-1, -1))
    if ids < 0 or step.inputs[table] is not t:
        return nbytes
    num_rows = math.prod(step.reads[ids].shape)
    return min(nbytes, num_rows * in_pages(nbytes // max(t.shape[0], 1)))
