"""The ranks of a run, seen from one of them."""

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from packtrain.errors import InputError, RankLost, printable

BUCKET = 1 << 20  # numbers that are exchanged at a time
PATIENCE = timedelta(
    hours=2
)  # of a rank for the others, while they live: rank 0 may write a large file
TOLD = timedelta(seconds=5)  # within which a rank that lives says that it does


class World:
    """`size` processes, of which this is number `rank`. This one: a process alone."""

    rank, size = 0, 1

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order."""
        return [value]

    def add(self, arrays: Sequence[np.ndarray]) -> None:
        """Each f32 array becomes its sum over all ranks, added in their order."""

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

    def __init__(self) -> None:
        self.rank, self.size = rank(), int(os.environ["WORLD_SIZE"])
        self.torch, self.dist = import_module("torch"), import_module("torch.distributed")
        self.torch.set_num_threads(1)
        try:
            self.dist.init_process_group("gloo", timeout=PATIENCE)
            self.store = self.dist.TCPStore(
                os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
            )
        except (RuntimeError, ValueError) as error:
            raise RankLost(f"rank {self.rank} cannot join the others: {_first(error)}") from None
        self.store.set_timeout(TOLD)
        self.mine = np.zeros(BUCKET, np.float32)
        self.theirs = [np.zeros(BUCKET, np.float32) for _ in range(self.size)]
        self.add([self.mine.copy()])  # a plan made later counts what an exchange takes

    def gather(self, value: Any) -> list[Any]:
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = self._all(np.array([data.size]), [np.zeros(1, np.int64) for _ in range(self.size)])
        most = max(int(size[0]) for size in sizes)
        mine = np.zeros(most, np.uint8)
        mine[: data.size] = data
        found = self._all(mine, [np.zeros(most, np.uint8) for _ in range(self.size)])
        return [pickle.loads(one.tobytes()) for one in found]

    def from_first(self, value: Any) -> Any:
        return self.gather(value if self.rank == 0 else None)[0]

    def add(self, arrays: Sequence[np.ndarray]) -> None:
        for pieces in buckets(arrays):
            count, at = sum(piece.size for piece in pieces), 0
            for piece in pieces:
                self.mine[at : at + piece.size] = piece
                at += piece.size
            first, *others = self._all(self.mine[:count], [one[:count] for one in self.theirs])
            for other in others:
                first += other
            at = 0
            for piece in pieces:
                piece[:] = first[at : at + piece.size]
                at += piece.size

    def _all(self, mine: np.ndarray, theirs: list[np.ndarray]) -> list[np.ndarray]:
        as_tensor = self.torch.from_numpy
        try:
            self.dist.all_gather([as_tensor(one) for one in theirs], as_tensor(mine))
        except RuntimeError as error:
            raise RankLost(self._lost(_first(error))) from None
        return theirs

    # ---- faults

    def tell(self, why: str) -> None:
        """Let the others know why this rank ends."""
        with suppress(RuntimeError):
            self.store.set(f"packtrain/ended/{self.rank}", why)

    def _lost(self, cause: str) -> str:
        """Which rank has ended, and why, as far as it can be known."""
        others = [other for other in range(self.size) if other != self.rank]
        try:
            self.store.set(f"packtrain/lives/{self.rank}", "")
            ended = [other for other in others if self.store.check([f"packtrain/ended/{other}"])]
            if ended:
                why = self.store.get(f"packtrain/ended/{ended[0]}").decode()
                return f"rank {ended[0]} has ended: {why}"
            silent = [other for other in others if not self._lives(other)]
        except RuntimeError:
            silent = [0]  # it kept the store
        names = " and ".join(f"rank {other}" for other in silent) or "the connection"
        return f"{names} was lost: {cause}; the last checkpoint is whole, go on with --resume"

    def _lives(self, other: int) -> bool:
        try:
            self.store.wait([f"packtrain/lives/{other}"], TOLD)
        except RuntimeError:
            # the rank that keeps the store may have ended meanwhile: then this raises
            self.store.set(f"packtrain/lives/{self.rank}", "")
            return False
        return True

    def close(self) -> None:
        with suppress(RuntimeError):
            self.dist.destroy_process_group()


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
def joined(share: Callable[[int], None]) -> Iterator[World]:
    """Take part in the run that the environment describes; if it describes none, alone.

    share  is called with the number of ranks on this machine. Raises InputError without PyTorch, RankLost.
    """
    global _here
    if not several():
        yield _here
        return
    check_torch()
    share(int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])))
    group = _here = Group()
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


def buckets(arrays: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """The numbers of the arrays in order, as lists of flat views of at most BUCKET together."""
    pieces, room = list[np.ndarray](), BUCKET
    for array in arrays:
        flat = array.reshape(-1)
        while flat.size:
            pieces.append(flat[:room])
            flat, room = flat[room:], room - pieces[-1].size
            if not room:
                yield pieces
                pieces, room = [], BUCKET
    if pieces:
        yield pieces


def _first(error: Exception) -> str:
    """The sentence of an error of gloo, without the place in its source and its advice."""
    text = str(error).partition("\n")[0]
    return printable(text.rpartition(".cc:")[2].partition("] ")[2] or text).partition(". ")[0]
