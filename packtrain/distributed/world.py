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
from packtrain.distributed.exchange import BUCKET, SLICE, Exchange, gathering, part_of
from packtrain.distributed.heartbeat import RESUME, SILENT_SECONDS, Heart
from packtrain.distributed.transport import Carrier, check_device, take

JOIN = timedelta(minutes=10)  # for all ranks to come
# of a rank for the others, while they live: rank 0 may write a large file
PATIENCE = timedelta(hours=24)


class World:
    """`size` processes, of which this is number `rank`. This one: a process alone."""

    rank, size = 0, 1
    waited = 0.0  # seconds, so far, in which nothing was done but to wait for an exchange

    @property
    def seconds(self) -> float:
        """Of exchanging, so far, whether or not something else was done meanwhile."""
        return 0.0

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order."""
        return [value]

    def add(self, arrays: Sequence[np.ndarray]) -> None:
        """Each f32 array becomes its sum over all ranks, added in their order."""
        self.send(arrays)
        self.arrived()

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        """The same, but without waiting for it: `arrived` does."""

    def spread(self, arrays: Sequence[np.ndarray]) -> None:
        """Each rank has its own part of each f32 array, see `part_of`; all get all parts, when `arrived` returns."""

    def reduce_scatter(
        self, array: np.ndarray, part: np.ndarray, fresh: bool, share: tuple[int, int]
    ) -> None:
        """This rank's numbers of the sum of a flat f32 array over all ranks become `part`, or are added to it, when
        `arrived` returns."""
        local_part = array[part_of(len(array), *share)]
        if fresh:
            part[:] = local_part
        else:
            part += local_part

    def arrived(self) -> None:
        """Until all that was sent is there."""

    def from_first(self, value: Any) -> Any:
        """The value of rank 0. The others wait for it."""
        return value

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on a rank."""
        return any(self.gather(flag))

    def total(self, number: float) -> float:
        """The sum over all ranks, added in their order."""
        return float(sum(self.gather(number)))


class Group(World):
    """The processes of PyTorch's environment variables: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

    def __init__(self, device: str) -> None:
        self.rank, self.size = rank(), int(os.environ["WORLD_SIZE"])
        self.heart = Heart(self.rank, self.size, _keeper())
        self.torch, self.dist = import_module("torch"), import_module("torch.distributed")
        self.gathering = gathering(self.dist)
        self.torch.set_num_threads(1)
        try:
            self.dist.init_process_group("gloo", timeout=JOIN)
            self.control = self.dist.new_group(backend="gloo", timeout=PATIENCE)
            self.exchange = Exchange(Carrier(device, PATIENCE), self._ready, self._check)
            self.store = _store(self.dist)
            self.heart.beat(lambda: _store(self.dist))
        except (RuntimeError, ValueError) as error:
            raise RankLost(f"rank {self.rank} cannot join the others: {_first(error)}") from None
        self.add([np.zeros(BUCKET, np.float32)])  # a plan made later counts what an exchange takes

    def gather(self, value: Any) -> list[Any]:
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = self._all(np.array([data.size])).tolist()
        padded = np.zeros(max(sizes), np.uint8)
        padded[: data.size] = data
        rows = self._all(padded).reshape(self.size, -1)
        return [pickle.loads(row.tobytes()) for row in rows]

    def from_first(self, value: Any) -> Any:
        return self.gather(value if self.rank == 0 else None)[0]

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        self.exchange.add(arrays)

    def spread(self, arrays: Sequence[np.ndarray]) -> None:
        self.exchange.spread(arrays)

    def reduce_scatter(
        self, array: np.ndarray, part: np.ndarray, fresh: bool, share: tuple[int, int]
    ) -> None:
        self.exchange.reduce_scatter(array, part, fresh)

    def arrived(self) -> None:
        start = time.perf_counter()
        self.exchange.wait()
        self.waited += time.perf_counter() - start

    @property
    def seconds(self) -> float:
        return self.exchange.seconds

    def _all(self, local_data: np.ndarray) -> np.ndarray:
        """The arrays of all ranks, one after the other."""
        gathered = np.empty(self.size * local_data.size, local_data.dtype)
        tensors = self.torch.from_numpy(gathered), self.torch.from_numpy(local_data)
        self._wait(self.gathering(*tensors, group=self.control, async_op=True))
        return gathered

    # ---- faults

    def _wait(self, transfer: Any) -> None:
        """Until it is done. Raises RankLost when another rank has ended or is silent."""
        while not transfer.is_completed():
            try:
                transfer.wait(timedelta(seconds=SLICE))
            except RuntimeError:  # not yet, or failed
                self._check()
        self._ready(transfer)

    def _check(self) -> None:
        if self.heart.lost:
            raise RankLost(self.heart.lost)

    def _ready(self, transfer: Any) -> None:
        """Until it is done or fails. A rank that is only silent does not make it fail."""
        try:
            transfer.wait()
        except RuntimeError as error:
            raise RankLost(self._lost(_first(error))) from None

    def tell(self, reason: str) -> None:
        """Let the others know why this rank ends."""
        with suppress(RuntimeError):
            self.heart.tell(self.store, reason)

    def _lost(self, cause: str) -> str:
        """Who was lost, if it becomes known."""
        who = self.heart.wait(SILENT_SECONDS)
        return who or f"the connection was lost: {cause}; {RESUME}"

    def close(self) -> None:
        with suppress(RuntimeError):
            self.heart.linger(self.store)
            self.heart.close(self.store)
        if self.heart.lost or not self.exchange.close():
            atexit.register(_end_now)  # threads of gloo wait for what never comes
            return
        with suppress(RuntimeError):
            # now, not when Python ends: threads of gloo may have to wait for it to drop what they hold
            self.control = None
            self.dist.destroy_process_group()


def _end_now() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)


def _keeper() -> str:
    """Who keeps the store, in words."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"the store at {os.environ['MASTER_ADDR']}" if agent else "rank 0"


def _store(dist: Any) -> Any:
    """A connection of its own to the store of the ranks."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(*address, is_master=False)


class Assumed(World):
    """One of so many processes that are not there, to plan for; all would say what this one does."""

    def __init__(self, size: int) -> None:
        self.size = size

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size


ALONE = World()
_here: World = ALONE


def here() -> World:
    """This process among the ranks of its run."""
    return _here


def rank() -> int:
    """The number of this process by its environment; 0 if it is alone."""
    return int(os.environ["RANK"]) if several() else 0


def several() -> bool:
    """Whether the environment describes a run of several ranks."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys() and int(os.environ["WORLD_SIZE"]) > 1


@contextmanager
def assumed(size: int) -> Iterator[World]:
    """Plan as rank 0 of a run of so many processes."""
    global _here
    before, _here = _here, Assumed(size)
    try:
        yield _here
    finally:
        _here = before


@contextmanager
def joined(share: Callable[[int], None], device: str = "cpu") -> Iterator[World]:
    """Take part in the run that the environment describes, on its device; if it describes none, alone.

    share  is called with the number of ranks on this machine. Raises InputError without PyTorch, RankLost.
    """
    global _here
    if not several():
        yield _here
        return
    check_torch()
    check_device(device)
    take(device)
    share(int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])))
    group = _here = Group(device)
    try:
        yield group
    except BaseException as error:
        if not isinstance(error, RankLost):
            group.tell(printable(str(error)) or type(error).__name__)
        raise
    finally:
        _here = ALONE
        group.close()


def check_torch() -> None:
    """Raise InputError unless PyTorch is installed."""
    if find_spec("torch") is None:
        raise InputError("several processes need PyTorch: pip install packtrain[torch]")


def _first(error: Exception) -> str:
    """The sentence of an error of gloo, without the place in its source and its advice."""
    text = str(error).partition("\n")[0]
    return printable(text.rpartition(".cc:")[2].partition("] ")[2] or text).partition(". ")[0]
