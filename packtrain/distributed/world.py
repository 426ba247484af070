"""The ranks of a run, seen from one of them."""

import atexit
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from packtrain.common.errors import InputError, RankLost, printable
from packtrain.distributed.exchange import BUCKET, SLICE, Exchange, gather_function, rank_slice
from packtrain.distributed.heartbeat import RESUME, SILENT_SECONDS, Heartbeat
from packtrain.distributed.transport import Carrier, check_device, select_device

JOIN_TIMEOUT = timedelta(minutes=10)  # time for all ranks to join
# longest wait for a rank that is alive: rank 0 may write a large file
PATIENCE = timedelta(hours=24)


class World:
    """The `world_size` processes of a run, of which this process is number `rank`.

    This class itself is for a process alone, or for planning: all ranks then have the values of this process.
    """

    waited = 0.0  # seconds so far in which this process only waited for an exchange

    def __init__(self, world_size: int = 1) -> None:
        self.rank, self.world_size = 0, world_size

    @property
    def exchange_seconds(self) -> float:
        """Seconds of exchanges so far, whether or not the process computed meanwhile."""
        return 0.0

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order; all ranks must call this."""
        return [value] * self.world_size

    def add(self, arrays: Sequence[np.ndarray]) -> None:
        """Replace each f32 array by its sum over all ranks, added in their order."""
        self.start_all_reduce(arrays)
        self.wait_for_transfers()

    def start_all_reduce(self, arrays: Sequence[np.ndarray]) -> None:
        """Begin to replace each f32 array by its sum over all ranks; `wait_for_transfers` waits for the end."""

    def start_all_gather(self, arrays: Sequence[np.ndarray]) -> None:
        """Begin to fill each flat f32 array with all ranks' parts; see rank_slice and `wait_for_transfers`."""

    def start_reduce_scatter(
        self, array: np.ndarray, local_sum: np.ndarray, fresh: bool, rank_and_size: tuple[int, int]
    ) -> None:
        """Begin to sum a flat f32 array over all ranks, and to write this rank's part (rank_slice) into `local_sum` if
        `fresh`, else to add it there; see `wait_for_transfers`. `rank_and_size`: (this rank, number of ranks)."""
        local_part = array[rank_slice(len(array), *rank_and_size)]
        if fresh:
            local_sum[:] = local_part
        else:
            local_sum += local_part

    def wait_for_transfers(self) -> None:
        """Wait until all exchanges that were begun are done."""

    def from_first(self, value: Any) -> Any:
        """Return rank 0's value on every rank; the `value` of other ranks is not used."""
        return value

    def any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank; all ranks must call this."""
        return any(self.gather(flag))

    def total(self, value: float) -> float:
        """Return the sum of the ranks' values, added in the order of ranks."""
        return float(sum(self.gather(value)))


class ProcessGroupWorld(World):
    """The processes of PyTorch's environment variables: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

    def __init__(self, device: str) -> None:
        self.rank, self.world_size = rank(), int(os.environ["WORLD_SIZE"])
        uses_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store_keeper = f"the store at {os.environ['MASTER_ADDR']}" if uses_agent else "rank 0"
        self.heartbeat = Heartbeat(self.rank, self.world_size, store_keeper)
        self.torch, self.dist = import_module("torch"), import_module("torch.distributed")
        self.gather_function = gather_function(self.dist)
        self.torch.set_num_threads(1)
        try:
            self.dist.init_process_group("gloo", timeout=JOIN_TIMEOUT)
            self.control_group = self.dist.new_group(backend="gloo", timeout=PATIENCE)
            self.exchange = Exchange(Carrier(device, PATIENCE), self._finish_transfer, self._check)
            self.store = _connect_store(self.dist)
            self.heartbeat.start_beating(lambda: _connect_store(self.dist))
        except (RuntimeError, ValueError) as error:
            raise RankLost(f"rank {self.rank} cannot join the others: {_first(error)}") from None
        self.add([np.zeros(BUCKET, np.float32)])  # later plans then count the memory of exchanges

    def gather(self, value: Any) -> list[Any]:
        local_bytes = np.frombuffer(pickle.dumps(value), np.uint8)
        all_nbytes = self._gather_arrays(np.array([local_bytes.size])).tolist()
        padded_bytes = np.zeros(max(all_nbytes), np.uint8)
        padded_bytes[: local_bytes.size] = local_bytes
        gathered_rows = self._gather_arrays(padded_bytes).reshape(self.world_size, -1)
        return [pickle.loads(rank_bytes.tobytes()) for rank_bytes in gathered_rows]

    def from_first(self, value: Any) -> Any:
        return self.gather(value if self.rank == 0 else None)[0]

    def start_all_reduce(self, arrays: Sequence[np.ndarray]) -> None:
        self.exchange.submit(self.exchange.all_reduce, arrays)

    def start_all_gather(self, arrays: Sequence[np.ndarray]) -> None:
        self.exchange.submit(self.exchange.all_gather, arrays)

    def start_reduce_scatter(
        self, array: np.ndarray, local_sum: np.ndarray, fresh: bool, rank_and_size: tuple[int, int]
    ) -> None:
        self.exchange.submit(self.exchange.reduce_scatter, (array, local_sum), fresh)

    def wait_for_transfers(self) -> None:
        start_seconds = time.perf_counter()
        self.exchange.wait_for_jobs()
        self.waited += time.perf_counter() - start_seconds

    @property
    def exchange_seconds(self) -> float:
        return self.exchange.transfer_seconds

    def _gather_arrays(self, local_data: np.ndarray) -> np.ndarray:
        """Return the arrays of all ranks as one array, in the order of the ranks."""
        gathered = np.empty(self.world_size * local_data.size, local_data.dtype)
        tensors = self.torch.from_numpy(gathered), self.torch.from_numpy(local_data)
        self._wait(self.gather_function(*tensors, group=self.control_group, async_op=True))
        return gathered

    # ---- faults

    def _wait(self, transfer: Any) -> None:
        """Wait for a transfer; look for losses meanwhile. Raises RankLost when another rank has ended or is silent."""
        while not transfer.is_completed():
            try:
                transfer.wait(timedelta(seconds=SLICE))
            except RuntimeError:  # the transfer has failed, or needs longer
                self._check()
        self._finish_transfer(transfer)

    def _check(self) -> None:
        """Raise RankLost if a rank, the store or the process that started the ranks is known to be lost."""
        if self.heartbeat.lost_reason:
            raise RankLost(self.heartbeat.lost_reason)

    def _finish_transfer(self, transfer: Any) -> None:
        """Wait for a transfer's end, also while a rank is only silent. Raises RankLost if the transfer fails."""
        try:
            transfer.wait()
        except RuntimeError as error:
            lost_reason = self.heartbeat.wait_for_loss(SILENT_SECONDS)
            reason = lost_reason or f"the connection was lost: {_first(error)}; {RESUME}"
            raise RankLost(reason) from None

    def report_end(self, reason: str) -> None:
        """Tell the other ranks why this rank ends."""
        with suppress(RuntimeError):
            self.heartbeat.report_end(self.store, reason)

    def close(self) -> None:
        with suppress(RuntimeError):
            self.heartbeat.wait_for_listeners(self.store)
            self.heartbeat.close(self.store)
        if self.heartbeat.lost_reason or not self.exchange.close():
            atexit.register(_exit_now)  # threads of gloo wait for messages that never come
            return
        with suppress(RuntimeError):
            # now, not when Python ends: threads of gloo may need Python to release their tensors
            self.control_group = None
            self.dist.destroy_process_group()


def _exit_now() -> None:
    """Flush the output and end the process with exit code 1, without waiting for threads."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)


def _connect_store(dist: Any) -> Any:
    """Open a new connection to the store of the ranks."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*address, is_master=False)


SINGLE_PROCESS = World()
_current_world: World = SINGLE_PROCESS


def current_world() -> World:
    """Return this process's view of the ranks of its run."""
    return _current_world


def rank() -> int:
    """Return the number of this process from its environment; 0 if it is alone."""
    return int(os.environ["RANK"]) if is_distributed() else 0


def is_distributed() -> bool:
    """Whether the environment describes a run of several ranks."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys() and int(os.environ["WORLD_SIZE"]) > 1


@contextmanager
def assume_world(world_size: int) -> Iterator[World]:
    """Let `current_world` be rank 0 of a run of `world_size` processes while the context is open, to plan it."""
    global _current_world
    previous_world, _current_world = _current_world, World(world_size)
    try:
        yield _current_world
    finally:
        _current_world = previous_world


@contextmanager
def join_world(share_machine: Callable[[int], None], device: str = "cpu") -> Iterator[World]:
    """Take part in the run that the environment describes, on `device`; if it describes none, run alone. Calls
    share_machine(ranks on this machine). Raises InputError without PyTorch or for the device; RankLost."""
    global _current_world
    if not is_distributed():
        yield _current_world
        return
    if find_spec("torch") is None:
        raise InputError("several processes need PyTorch: pip install packtrain[torch]")
    check_device(device)
    select_device(device)
    share_machine(int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])))
    group = _current_world = ProcessGroupWorld(device)
    try:
        yield group
    except BaseException as error:
        if not isinstance(error, RankLost):
            group.report_end(printable(str(error)) or type(error).__name__)
        raise
    finally:
        _current_world = SINGLE_PROCESS
        group.close()


def _first(error: Exception) -> str:
    """Return the first sentence of an error of gloo, without file and line of gloo's source, which stand before it."""
    text = str(error).partition("\n")[0]
    return printable(text.rpartition(".cc:")[2].partition("] ")[2] or text).partition(". ")[0]
