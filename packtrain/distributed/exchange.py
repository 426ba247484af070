"""Sums over ranks on a thread of their own, so that the work goes on while numbers travel.

Each rank adds up an equal part of a bucket, in the order of the ranks, and sends the sums to all: the same bits each
time and on each rank, and 2 (k - 1) / k times the bucket for each of k ranks to send.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

from packtrain.distributed.transport import Carrier, on_device

BUCKET = 1 << 20  # numbers that are exchanged at a time
IDLE_SECONDS = 1.0
ROOMS = 2  # of so many numbers: what is sent, and what comes
ALIGNED = 16  # numbers: parts of an array begin where kernels like arrays to begin

SLICE = 0.5  # seconds of waiting, after which it is seen who has been lost
Wait = Callable[[Any], None]
Run = tuple[int, int, int]  # the number of an array, and from where to where


class Exchange:
    """Jobs that all ranks give in the same order. The arrays of a job, of NumPy or PyTorch, must not be touched until
    `wait` returns.

    wait    waits for a transfer, or raises RankLost
    check    raises RankLost if another rank has ended or is silent
    seconds  that transfers and sums took so far, and `nbytes` that this rank sent
    """

    def __init__(self, by: Carrier, wait: Wait, check: Callable[[], None]) -> None:
        self.by, self.ready, self.check = by, wait, check
        self.rank, self.size = by.dist.get_rank(), by.dist.get_world_size()
        part = -(-BUCKET // self.size)
        self.mine, self.theirs = (by.room(part * self.size) for _ in range(ROOMS))
        self.jobs = SimpleQueue[Callable[[], None] | None]()
        self.given = self.done = self.nbytes = 0
        self.seconds = 0.0
        self.error: BaseException | None = None
        self.changed = threading.Condition()
        threading.Thread(target=self._work, daemon=True).start()

    def add(self, arrays: Sequence[Any]) -> None:
        """Each array becomes its sum over all ranks."""
        self._give(self._add, [self.by.flat(array) for array in arrays])

    def spread(self, arrays: Sequence[Any]) -> None:
        """Each rank has an equal run of each array's numbers, see `part_of`; all get all of them."""
        self._give(self._spread, [self.by.flat(array) for array in arrays])

    def reduce_scatter(self, array: Any, part: Any, fresh: bool) -> None:
        """This rank's run of the sum of a flat array becomes `part`, or is added to it."""
        self._give(self._reduce_scatter, self.by.flat(array), self.by.flat(part), fresh)

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
            is_idle = self.changed.wait_for(lambda: self.done >= self.given, IDLE_SECONDS)
        if is_idle:
            self.jobs.put(None)
            self.by.group = None
        return is_idle

    def _give(self, job: Callable[..., None], *of: Any) -> None:
        self.given += 1
        mark = self.by.given()

        def turn() -> None:
            with self.by.turn(mark):
                job(*of)

        self.jobs.put(turn)

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                start = time.perf_counter()
                if self.error is None:
                    job()
                del job  # and what it holds
                self.seconds += time.perf_counter() - start
                with self.changed:
                    self.done += 1
                    self.changed.notify_all()
            except BaseException as error:
                with self.changed:
                    self.error = error
                    self.changed.notify_all()

    # ---- on the thread

    def _add(self, arrays: Sequence[Any]) -> None:
        for pieces in buckets(arrays):
            part = -(-sum(len(piece) for piece in pieces) // self.size)
            outgoing, incoming = self._rows(part)
            for piece, place in _places(pieces, outgoing.view(-1)):
                place.copy_(piece)
            outgoing[0].copy_(self._sum(incoming, outgoing))
            self._move(incoming, [outgoing[0]] * self.size)
            for piece, place in _places(pieces, incoming.view(-1)):
                piece.copy_(place)

    def _reduce_scatter(self, array: Any, part: Any, fresh: bool) -> None:
        every = [array[part_of(len(array), i, self.size)] for i in range(self.size)]
        for ((_, start, end),) in _runs([len(every[0])], BUCKET // self.size):
            outgoing, incoming = self._rows(end - start)
            for piece, place in zip(every, outgoing, strict=True):
                place[: len(piece[start:end])].copy_(piece[start:end])
            local_part = part[start:end]
            total = self._sum(incoming, outgoing)[: len(local_part)]
            if fresh:
                local_part.copy_(total)
            else:
                local_part.add_(total)

    def _spread(self, arrays: Sequence[Any]) -> None:
        every = [
            [array[part_of(len(array), i, self.size)] for array in arrays] for i in range(self.size)
        ]
        # the first rank has the longest parts, the last may have none
        for runs in _runs([len(part) for part in every[0]], BUCKET // self.size):
            (outgoing, *_), incoming = self._rows(sum(end - start for _, start, end in runs))
            local_pieces = [every[self.rank][i][a:b] for i, a, b in runs]
            for piece, place in _places(local_pieces, outgoing, runs):
                place.copy_(piece)
            self._move(incoming, [outgoing] * self.size)
            for parts, received in zip(every, incoming, strict=True):
                for piece, place in _places([parts[i][a:b] for i, a, b in runs], received, runs):
                    piece.copy_(place)

    def _rows(self, count: int) -> tuple[Any, Any]:
        """Room for so many numbers to each rank, and from each."""
        outgoing, incoming = (room[: count * self.size] for room in (self.mine, self.theirs))
        return outgoing.view(self.size, count), incoming.view(self.size, count)

    def _sum(self, incoming: Any, outgoing: Any) -> Any:
        """What all ranks have for this one, added up in their order."""
        self._move(incoming, outgoing)
        total = incoming[0]
        for other in incoming[1:]:
            total.add_(other)
        return total

    def _move(self, to: Any, outgoing: Any) -> None:
        """outgoing[i] is for rank i, and to[i] from it."""
        moved = self.by.move(to, outgoing, self.rank)
        to[self.rank].copy_(outgoing[self.rank])
        for work in moved:
            self.ready(work)
        self.nbytes += (self.size - 1) * to[0].nbytes


def gathering(dist: Any) -> Any:
    """The function that gathers equal parts into one array, under its name of before or after PyTorch 2.13."""
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def rooms_nbytes(ranks: int, device: str) -> int:
    """Bytes of a device from which its process sends sums to others; those of the host are taken before planning."""
    return 4 * ROOMS * -(-BUCKET // ranks) * ranks * (ranks > 1 and on_device(device))


def part_of(count: int, rank: int, size: int) -> slice:
    """The numbers of an array of `count` that are this rank's: equal runs; the last may be shorter or empty."""
    part = -(-count // (size * ALIGNED)) * ALIGNED
    return slice(min(part * rank, count), min(part * (rank + 1), count))


def buckets(arrays: Sequence[Any]) -> Iterator[list[Any]]:
    """The numbers of flat arrays in order, as lists of views of at most BUCKET together."""
    for runs in _runs([len(array) for array in arrays], BUCKET):
        yield [arrays[i][start:end] for i, start, end in runs]


def _runs(sizes: Sequence[int], max_count: int) -> Iterator[list[Run]]:
    """Arrays of these sizes one after the other, as lists of runs of at most `max_count` numbers together."""
    runs, room = list[Run](), max_count
    for i, size in enumerate(sizes):
        start = 0
        while start < size:
            end = min(start + room, size)
            runs.append((i, start, end))
            start, room = end, room - (end - start)
            if not room:
                yield runs
                runs, room = [], max_count
    if runs:
        yield runs


def _places(
    pieces: Sequence[Any], buffer: Any, runs: Sequence[Run] | None = None
) -> Iterator[tuple[Any, Any]]:
    """Each piece with its place in a flat array; they lie side by side, or as far apart as the runs are long."""
    lengths = [len(p) for p in pieces] if runs is None else [end - start for _, start, end in runs]
    at = 0
    for piece, length in zip(pieces, lengths, strict=True):
        yield piece, buffer[at : at + len(piece)]
        at += length
