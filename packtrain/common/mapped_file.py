"""Mapped files, whose pages can be asked for and given back."""

import ctypes
import math
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from packtrain.common.errors import DoesNotFit, InputError
from packtrain.common.memory import parse_size, private_nbytes

# the system reads no more than it thinks fit of each request, and of large ones only the beginning
PREFETCH_NBYTES = 1 << 20
OVERHEAD_NBYTES = 24 << 20  # for compiled kernels, and for what runs allocate for moments
SLACK_NBYTES = 4 << 20  # that another attempt may need in addition


class MappedFile(mmap.mmap):
    """A file, mapped from end to end, read-only unless it is `writable`. Arrays over it keep it open."""

    path: Path
    descriptor: int

    def __new__(cls, path: Path, *, writable: bool = False) -> "MappedFile":
        with open(path, "r+b" if writable else "rb") as file:
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self = super().__new__(cls, file.fileno(), 0, access=access)
            self.path, self.descriptor = path, os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor)
        return self

    def byte_range(self, array: np.ndarray) -> tuple[int, int]:
        """Return (start, end), in bytes of this file, of a dense array over the file."""
        start = array.ctypes.data - np.frombuffer(self, np.uint8).ctypes.data
        return start, start + array.nbytes

    def prefetch(self, start: int, stop: int) -> None:
        """Ask the system to read these bytes, `start` to `stop`, in the background."""
        for first in range(start, stop, PREFETCH_NBYTES):
            if sys.platform == "linux":
                nbytes = min(PREFETCH_NBYTES, stop - first)
                os.posix_fadvise(self.descriptor, first, nbytes, os.POSIX_FADV_WILLNEED)

    def release(self, start: int, stop: int) -> None:
        """Give the pages of the bytes `start` to `stop` back to the system; the next access reads them again."""
        if sys.platform == "linux":
            start = start // mmap.PAGESIZE * mmap.PAGESIZE
            self.flush(start, stop - start)  # changed pages stay until they are on the disk
            self.madvise(mmap.MADV_DONTNEED, start, stop - start)
            nbytes = -(-(stop - start) // mmap.PAGESIZE) * mmap.PAGESIZE
            os.posix_fadvise(self.descriptor, start, nbytes, os.POSIX_FADV_DONTNEED)

    def release_all(self) -> None:
        """Give all pages back, and keep the system from reading more of the file than is accessed or asked for."""
        if sys.platform == "linux":
            self.madvise(mmap.MADV_RANDOM)
            with suppress(OSError):  # pages of a new file stay until they are on the disk
                os.fsync(self.descriptor)
            self.release(0, len(self))

    def resident_nbytes(self) -> int:
        """Return the bytes of its pages in memory, whoever reads them. Raises OSError."""
        flags = np.zeros(-(-len(self) // mmap.PAGESIZE), np.uint8)
        data = np.frombuffer(self, np.uint8)
        if ctypes.CDLL(None).mincore(data.ctypes, ctypes.c_size_t(len(self)), flags.ctypes):
            raise OSError(f"{self.path}: mincore failed")
        return int((flags & 1).sum()) * mmap.PAGESIZE


FileRange = tuple[MappedFile, int, int]


@dataclass(slots=True)
class PageBudget:
    """The process's limit on pages of mapped files in memory, and what it is spent on.

    nbytes    most bytes in memory
    resident  bytes by range (file, start, stop) that may be in memory; `user`: page window that last ran to its end
    files     files whose pages come and go as the budget says
    rows      bytes by range of rows and experts that were looked up and stay, the latest last
    """

    nbytes: int
    resident: dict[FileRange, int] = field(default_factory=dict)
    files: set[MappedFile] = field(default_factory=set)
    rows: dict[FileRange, int] = field(default_factory=dict)
    user: object = None

    def admit(self, file: MappedFile) -> None:
        """Give back all pages of a file, which the budget limits from now on. Raises DoesNotFit if they stay."""
        if file not in self.files:
            file.release_all()
            self.files.add(file)
            if file.resident_nbytes() > self.nbytes:
                fact = f"{file.path}: another program, or a file system in memory, keeps its pages"
                raise DoesNotFit(f"{fact}; --resident cannot limit them, leave it out")


page_budget = ContextVar[PageBudget | None]("page_budget", default=None)  # None: the system decides


@contextmanager
def limited_pages(limit: int | PageBudget | None) -> Iterator[None]:
    """`with limited_pages(n):` keeps at most n bytes of mapped files in memory; None leaves that to the system. Raises
    InputError where the system does not let go of pages."""
    if limit is not None and sys.platform != "linux":
        raise InputError("--resident: only Linux lets a process give back pages of a file")
    outer_budget = page_budget.set(PageBudget(limit) if isinstance(limit, int) else limit)
    try:
        yield
    finally:
        page_budget.reset(outer_budget)


@contextmanager
def more_pages(nbytes: int) -> Iterator[None]:
    """`with more_pages(n):` adds n bytes, which may be negative, to the limit on resident pages, if there is one."""
    budget = page_budget.get()
    with limited_pages(None if budget is None else budget.nbytes + nbytes):
        yield


class WindowTooSmall(DoesNotFit):
    """Raised if one call reads more weights than the limit lets stay in memory."""

    def __init__(self, missing_nbytes: int) -> None:
        super().__init__(
            f"--resident leaves {missing_nbytes:,} bytes too little for what one call reads of the model"
        )
        self.missing_nbytes = missing_nbytes


@contextmanager
def pages_within(
    resident: int | str | None, needed_nbytes: Callable[[], int], page_nbytes: int = 0,
    shared: PageBudget | None = None,
) -> Iterator[None]:  # fmt: skip
    """Within the block, limit pages of mapped files to what `resident` leaves beside private memory; None: no limit.

    needed_nbytes  returns the private bytes that will be allocated
    page_nbytes    least bytes of pages; 0: known when graphs are bound
    shared         an existing budget, made for this limit, whose room is used instead of a new one
    Raises DoesNotFit, which names a size that would do, if one call reads more than that.
    """
    if resident is None:
        yield
        return
    limit = parse_size(resident, "resident") if isinstance(resident, str) else resident
    room = limit - private_nbytes() - OVERHEAD_NBYTES - needed_nbytes()
    try:
        if page_nbytes and room < page_nbytes:
            raise WindowTooSmall(page_nbytes - room)
        with limited_pages(shared or room):
            yield
    except WindowTooSmall as error:
        sufficient = math.ceil((limit + error.missing_nbytes + SLACK_NBYTES) / (1 << 20))
        raise DoesNotFit(f"--resident {resident}: {sufficient}MiB would do") from None


@contextmanager
def passing_pages(array: np.ndarray) -> Iterator[None]:
    """`with passing_pages(array):` asks for an array's pages, and gives them back afterwards unless they are resident.
    Nothing happens where pages are not limited, or if the array is no view of a file."""
    budget, file = page_budget.get(), mapped_file(array)
    if budget is None or file is None:
        yield
        return
    budget.admit(file)
    start, stop = file.byte_range(array)
    is_kept = any(f is file and a <= start and stop <= b for f, a, b in budget.resident)
    if not is_kept:
        file.prefetch(start, stop)
    try:
        yield
    finally:
        if not is_kept:
            file.release(start, stop)


def mapped_file(array: np.ndarray) -> MappedFile | None:
    """Return the file that an array is a view of; None if it has memory of its own."""
    base: object = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return base if isinstance(base, MappedFile) else None
