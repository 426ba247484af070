"""Sums over ranks on a thread of their own, so that the work goes on while numbers travel.

Each rank adds up an equal part of a bucket, in the order of the ranks, and sends the sums to all: the same bits each
time and on each rank, and 2 (k - 1) / k times the bucket for each of k ranks to send.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np

BUCKET = 1 << 20  # numbers that are exchanged at a time
IDLE_SECONDS = 1.0
ALIGNED = 16  # numbers: parts of an array begin where kernels like arrays to begin

SLICE = 0.5  # seconds of waiting, after which it is seen who has been lost
Wait = Callable[[Any], None]
Run = tuple[int, int, int]  # the number of an array, and from where to where


class Exchange:
    """Jobs that all ranks give in the same order. The arrays of a job must not be touched until `wait` returns.

    ready    waits for a transfer, or raises RankLost
    check    raises RankLost if another rank has ended or is silent
    seconds  that transfers and sums took so far, and `nbytes` that this rank sent
    """

    def __init__(
        self, dist: Any, as_tensor: Any, ready: Wait, check: Callable[[], None], patience: Any
    ) -> None:
        self.dist, self.as_tensor, self.ready, self.check = dist, as_tensor, ready, check
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        size = self.size
        self.group = dist.new_group(backend="gloo", timeout=patience)
        part = -(-BUCKET // size)
        self.mine, self.theirs = (np.zeros(part * size, np.float32) for _ in range(2))
        self.jobs = SimpleQueue[Callable[[], None] | None]()
        self.given = self.done = self.nbytes = 0
        self.seconds = 0.0
        self.error: BaseException | None = None
        self.changed = threading.Condition()
        threading.Thread(target=self._work, daemon=True).start()

    def add(self, arrays: Sequence[np.ndarray]) -> None:
        """Each f32 array becomes its sum over all ranks."""
        self._give(lambda: self._add(arrays))

    def spread(self, arrays: Sequence[np.ndarray]) -> None:
        """Each rank has an equal run of each array's numbers, see `part_of`; all get all of them."""
        self._give(lambda: self._spread(arrays))

    def reduce_scatter(self, array: np.ndarray, part: np.ndarray, fresh: bool) -> None:
        """This rank's run of the sum of a flat f32 array becomes `part`, or is added to it."""
        self._give(lambda: self._reduce_scatter(array, part, fresh))

    def wait(self) -> None:
        """Until all jobs are done. Raises what one of them raised."""
        with self.changed:
            while self.done < self.given and self.error is None:
                self.changed.wait(SLICE)
                self.check()
        if self.error is not None:
            raise self.error

    def close(self) -> bool:
        """End the thread, if all jobs are done, or will be in a moment."""
        with self.changed:
            idle = self.changed.wait_for(lambda: self.done >= self.given, IDLE_SECONDS)
        if idle:
            self.jobs.put(None)
            self.group = None
        return idle

    def _give(self, job: Callable[[], None]) -> None:
        self.given += 1
        self.jobs.put(job)

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                began = time.perf_counter()
                if self.error is None:
                    job()
                del job  # and what it holds
                self.seconds += time.perf_counter() - began
                with self.changed:
                    self.done += 1
                    self.changed.notify_all()
            except BaseException as error:
                with self.changed:
                    self.error = error
                    self.changed.notify_all()

    # ---- on the thread

    def _add(self, arrays: Sequence[np.ndarray]) -> None:
        for pieces in buckets(arrays):
            part = -(-sum(piece.size for piece in pieces) // self.size)
            mine, theirs = self._rows(part)
            for piece, place in _places(pieces, mine.reshape(-1)):
                place[:] = piece
            mine[0] = self._sum(theirs, mine)
            self._move(theirs, [mine[0]] * self.size)
            for piece, place in _places(pieces, theirs.reshape(-1)):
                piece[:] = place

    def _reduce_scatter(self, array: np.ndarray, part: np.ndarray, fresh: bool) -> None:
        every = [array[part_of(array.size, i, self.size)] for i in range(self.size)]
        for ((_, start, end),) in _runs([every[0].size], BUCKET // self.size):
            mine, theirs = self._rows(end - start)
            for piece, place in zip(every, mine, strict=True):
                place[: piece[start:end].size] = piece[start:end]
            own = part[start:end]
            total = self._sum(theirs, mine)[: own.size]
            own[:] = total if fresh else own + total

    def _spread(self, arrays: Sequence[np.ndarray]) -> None:
        every = [
            [array.reshape(-1)[part_of(array.size, i, self.size)] for array in arrays]
            for i in range(self.size)
        ]
        # the first rank has the longest parts, the last may have none
        for runs in _runs([part.size for part in every[0]], BUCKET // self.size):
            (mine, *_), theirs = self._rows(sum(end - start for _, start, end in runs))
            own = [every[self.rank][i][a:b] for i, a, b in runs]
            for piece, place in _places(own, mine, runs):
                place[:] = piece
            self._move(theirs, [mine] * self.size)
            for parts, got in zip(every, theirs, strict=True):
                for piece, place in _places([parts[i][a:b] for i, a, b in runs], got, runs):
                    piece[:] = place

    def _rows(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Room for so many numbers to each rank, and from each."""
        mine, theirs = (room[: count * self.size] for room in (self.mine, self.theirs))
        return mine.reshape(self.size, count), theirs.reshape(self.size, count)

    def _sum(self, theirs: np.ndarray, mine: np.ndarray) -> np.ndarray:
        """What all ranks have for this one, added up in their order."""
        self._move(theirs, mine)
        total: np.ndarray = theirs[0]
        for other in theirs[1:]:
            total += other
        return total

    def _move(self, to: np.ndarray, given: np.ndarray | Sequence[np.ndarray]) -> None:
        """given[i] is for rank i, and to[i] from it. All travel at once, each as a message: gloo's all_to_all
        leaves a link idle in one direction while it is busy in the other, and its gathers make copies."""
        others = [i for i in range(self.size) if i != self.rank]
        moved = [self.dist.irecv(self.as_tensor(to[i]), i, group=self.group) for i in others]
        moved += [self.dist.isend(self.as_tensor(given[i]), i, group=self.group) for i in others]
        to[self.rank] = given[self.rank]
        for one in moved:
            self.ready(one)
        self.nbytes += len(others) * to[0].nbytes


def gathering(dist: Any) -> Any:
    """The function that gathers equal parts into one array, under its name of before or after PyTorch 2.13."""
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def part_of(count: int, rank: int, size: int) -> slice:
    """The numbers of an array of `count` that are this rank's: equal runs; the last may be shorter or empty."""
    part = -(-count // (size * ALIGNED)) * ALIGNED
    return slice(min(part * rank, count), min(part * (rank + 1), count))


def buckets(arrays: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """The numbers of the arrays in order, as lists of flat views of at most BUCKET together."""
    flat = [array.reshape(-1) for array in arrays]
    for runs in _runs([array.size for array in flat], BUCKET):
        yield [flat[i][start:end] for i, start, end in runs]


def _runs(sizes: Sequence[int], most: int) -> Iterator[list[Run]]:
    """Arrays of these sizes one after the other, as lists of runs of at most `most` numbers together."""
    runs, room = list[Run](), most
    for i, size in enumerate(sizes):
        start = 0
        while start < size:
            end = min(start + room, size)
            runs.append((i, start, end))
            start, room = end, room - (end - start)
            if not room:
                yield runs
                runs, room = [], most
    if runs:
        yield runs


def _places(
    pieces: Sequence[np.ndarray], within: np.ndarray, runs: Sequence[Run] | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Each piece with its place in a flat array; they lie side by side, or as far apart as the runs are long."""
    lengths = [p.size for p in pieces] if runs is None else [end - start for _, start, end in runs]
    at = 0
    for piece, length in zip(pieces, lengths, strict=True):
        yield piece, within[at : at + piece.size]
        at += length
