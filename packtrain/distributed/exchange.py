"""Adds up arrays over ranks on a thread of its own, so that computation goes on while numbers travel.

Each rank adds up an equal part of a bucket, in the order of the ranks, and sends the sums to all: equal bits each time
and on each rank, and 2 (k - 1) / k times the bucket for each of k ranks to send."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

from packtrain.distributed.transport import Carrier, sends_from_device

BUCKET = 1 << 20  # numbers that are exchanged at a time
IDLE_SECONDS = 1.0  # seconds that closing waits for jobs to end
NUM_ROOMS = 2  # rooms of BUCKET numbers: for numbers that leave, and for those that come
RUN_ALIGNMENT = 16  # numbers to whose multiples kernels like arrays to be aligned

SLICE = 0.5  # seconds between two checks for lost ranks while waiting
WaitForTransfer = Callable[[Any], None]
ArrayRun = tuple[int, int, int]  # index of an array, first and end number of the run


class Exchange:
    """Runs jobs that all ranks submit in the same order; arrays must not be touched until `wait_for_jobs` returns.

    wait_for_transfer  waits for a transfer, or raises RankLost
    check_ranks        raises RankLost if another rank has ended or is silent
    transfer_seconds   seconds that transfers and sums took so far
    """

    def __init__(self, by: Carrier, wait: WaitForTransfer, check_ranks: Callable[[], None]) -> None:
        self.by, self.wait_for_transfer, self.check_ranks = by, wait, check_ranks
        self.rank, self.world_size = by.dist.get_rank(), by.dist.get_world_size()
        part = -(-BUCKET // self.world_size)
        self.send_room, self.theirs = (by.room(part * self.world_size) for _ in range(NUM_ROOMS))
        self.job_queue = SimpleQueue[Callable[[], None] | None]()
        self.num_submitted = self.done = 0
        self.transfer_seconds = 0.0
        self.error: BaseException | None = None
        self.condition = threading.Condition()
        threading.Thread(target=self._work_off_jobs, daemon=True).start()

    def wait_for_jobs(self) -> None:
        """Wait until all jobs are done. Raises RankLost, or the error of the first job that failed."""
        with self.condition:
            while self.done < self.num_submitted and self.error is None:
                self.condition.wait(SLICE)
                self.check_ranks()
        if self.error is not None:
            raise self.error

    def close(self) -> bool:
        """End the thread if all jobs end within IDLE_SECONDS, else leave it running; return whether they did."""
        with self.condition:
            is_idle = self.condition.wait_for(lambda: self.done >= self.num_submitted, IDLE_SECONDS)
        if is_idle:
            self.job_queue.put(None)
            self.by.group = None
        return is_idle

    def submit(self, job: Callable[..., None], arrays: Sequence[Any], *arguments: Any) -> None:
        """Queue job(flat views of arrays, *arguments); the job begins once GPU kernels started so far have ended."""
        self.num_submitted += 1
        kernel_mark, tensors = self.by.mark_kernels(), [self.by.flat(array) for array in arrays]

        def run_job() -> None:
            with self.by.after_kernels(kernel_mark):
                job(tensors, *arguments)

        self.job_queue.put(run_job)

    def _work_off_jobs(self) -> None:
        while (job := self.job_queue.get()) is not None:
            try:
                start_seconds = time.perf_counter()
                if self.error is None:
                    job()
                del job  # and the arrays that the job refers to
                self.transfer_seconds += time.perf_counter() - start_seconds
                with self.condition:
                    self.done += 1
                    self.condition.notify_all()
            except BaseException as error:
                with self.condition:
                    self.error = error
                    self.condition.notify_all()

    # ---- jobs, on the thread

    def all_reduce(self, arrays: Sequence[Any]) -> None:
        """Replace each flat tensor by its sum over all ranks."""
        for pieces in split_into_buckets(arrays):
            numbers_per_rank = -(-sum(len(piece) for piece in pieces) // self.world_size)
            outgoing, incoming = self._room_views(numbers_per_rank)
            for piece, buffer_part in _places(pieces, outgoing.view(-1)):
                buffer_part.copy_(piece)
            outgoing[0].copy_(self._sum_in_order(incoming, outgoing))
            self._exchange_parts(incoming, [outgoing[0]] * self.world_size)
            for piece, buffer_part in _places(pieces, incoming.view(-1)):
                piece.copy_(buffer_part)

    def reduce_scatter(self, arrays: Sequence[Any], fresh: bool) -> None:
        """Sum arrays[0], a flat tensor, over all ranks; write this rank's run of the sum (see rank_slice) into the flat
        tensor arrays[1] if `fresh`, else add it there."""
        (array, local_sum), size = arrays, self.world_size
        rank_parts = [array[rank_slice(len(array), i, size)] for i in range(size)]
        for ((_, run_start, run_end),) in _runs([len(rank_parts[0])], BUCKET // self.world_size):
            outgoing, incoming = self._room_views(run_end - run_start)
            for piece, buffer_part in zip(rank_parts, outgoing, strict=True):
                buffer_part[: len(piece[run_start:run_end])].copy_(piece[run_start:run_end])
            local_part = local_sum[run_start:run_end]
            summed = self._sum_in_order(incoming, outgoing)[: len(local_part)]
            if fresh:
                local_part.copy_(summed)
            else:
                local_part.add_(summed)

    def all_gather(self, arrays: Sequence[Any]) -> None:
        """Fill each flat tensor, of which every rank has its run (see `rank_slice`), with the runs of all ranks."""
        size = self.world_size
        rank_parts = [[a[rank_slice(len(a), i, size)] for a in arrays] for i in range(size)]
        # the first rank has the longest parts, the last may have none
        for runs in _runs([len(part) for part in rank_parts[0]], BUCKET // size):
            (outgoing, *_), incoming = self._room_views(sum(end - start for _, start, end in runs))
            local_pieces = [rank_parts[self.rank][i][a:run_end] for i, a, run_end in runs]
            for piece, place in _places(local_pieces, outgoing, runs):
                place.copy_(piece)
            self._exchange_parts(incoming, [outgoing] * self.world_size)
            for parts, received in zip(rank_parts, incoming, strict=True):
                for piece, place in _places([parts[i][a:b] for i, a, b in runs], received, runs):
                    piece.copy_(place)

    def _room_views(self, count: int) -> tuple[Any, Any]:
        """Return (outgoing, incoming), buffers (ranks, count) to send from and to receive into: a row for each rank."""
        outgoing, incoming = (r[: count * self.world_size] for r in (self.send_room, self.theirs))
        return outgoing.view(self.world_size, count), incoming.view(self.world_size, count)

    def _sum_in_order(self, incoming: Any, outgoing: Any) -> Any:
        """Send outgoing[i] to each rank i; return the sum of what all ranks sent to this one, added in their order."""
        self._exchange_parts(incoming, outgoing)
        summed = incoming[0]
        for rank_numbers in incoming[1:]:
            summed.add_(rank_numbers)
        return summed

    def _exchange_parts(self, incoming: Any, outgoing: Any) -> None:
        """Send outgoing[i] to rank i and receive incoming[i] from it, for all ranks."""
        transfers = self.by.start_transfers(incoming, outgoing, self.rank)
        incoming[self.rank].copy_(outgoing[self.rank])
        for transfer in transfers:
            self.wait_for_transfer(transfer)


def gather_function(dist: Any) -> Any:
    """Return the function of `dist`, torch.distributed, that gathers equal parts into one tensor; 2.13 renamed it."""
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def rooms_nbytes(ranks: int, device: str) -> int:
    """Return the bytes of a GPU's buffers for exchanges of `ranks` ranks; 0 for the host, whose baseline has them."""
    return 4 * NUM_ROOMS * -(-BUCKET // ranks) * ranks * (ranks > 1 and sends_from_device(device))


def rank_slice(num_elements: int, rank: int, world_size: int) -> slice:
    """Return a rank's run of an array: equal multiples of RUN_ALIGNMENT, but the last runs may be short or empty."""
    part = -(-num_elements // (world_size * RUN_ALIGNMENT)) * RUN_ALIGNMENT
    return slice(min(part * rank, num_elements), min(part * (rank + 1), num_elements))


def split_into_buckets(arrays: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield the numbers of flat arrays in order, as lists of views of at most BUCKET numbers together."""
    for runs in _runs([len(array) for array in arrays], BUCKET):
        yield [arrays[array_index][run_start:run_end] for array_index, run_start, run_end in runs]


def _runs(array_lengths: Sequence[int], max_numbers: int) -> Iterator[list[ArrayRun]]:
    """Cut arrays into runs (array's index, start, end); yield lists of runs of `max_numbers` numbers at most."""
    runs, remaining_numbers = list[ArrayRun](), max_numbers
    for array_index, array_length in enumerate(array_lengths):
        run_start = 0
        while run_start < array_length:
            run_end = min(run_start + remaining_numbers, array_length)
            runs.append((array_index, run_start, run_end))
            run_start, remaining_numbers = run_end, remaining_numbers - (run_end - run_start)
            if not remaining_numbers:
                yield runs
                runs, remaining_numbers = [], max_numbers
    if runs:
        yield runs


def _places(
    pieces: Sequence[Any], buffer: Any, runs: Sequence[ArrayRun] | None = None
) -> Iterator[tuple[Any, Any]]:
    """Yield (piece, its slice of a flat buffer), one after the other, or with `runs` as far apart as runs are long."""
    lengths = [len(p) for p in pieces] if runs is None else [end - start for _, start, end in runs]
    offset = 0
    for piece, length in zip(pieces, lengths, strict=True):
        yield piece, buffer[offset : offset + len(piece)]
        offset += length
