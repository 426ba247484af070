"""Files mapped to be read, whose pages can be asked for and given back."""

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from packtrain.common.errors import InputError

# the system reads no more than it thinks fit of each request, and of large ones only the beginning
PREFETCH_NBYTES = 1 << 20


class MappedFile(mmap.mmap):
    """A file, mapped read-only from end to end. Arrays over it keep it open."""

    path: Path
    descriptor: int

    def __new__(cls, path: Path) -> "MappedFile":
        with open(path, "rb") as file:
            self = super().__new__(cls, file.fileno(), 0, access=mmap.ACCESS_READ)
            self.path, self.descriptor = path, os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor)
        return self

    def byte_range(self, array: np.ndarray) -> tuple[int, int]:
        """Return at which offsets of this file a dense array over it begins and ends."""
        start = array.ctypes.data - np.frombuffer(self, np.uint8).ctypes.data
        return start, start + array.nbytes

    def prefetch(self, start: int, stop: int) -> None:
        """Ask the system to read these bytes, `start` to `stop`, in the background."""
        for first in range(start, stop, PREFETCH_NBYTES):
            if sys.platform == "linux":
                nbytes = min(PREFETCH_NBYTES, stop - first)
                os.posix_fadvise(self.descriptor, first, nbytes, os.POSIX_FADV_WILLNEED)

    def release(self, start: int, stop: int) -> None:
        """Give the pages of these bytes back to the system, shared ones included; the next access reads them again."""
        if sys.platform == "linux":
            start = start // mmap.PAGESIZE * mmap.PAGESIZE
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
    resident  bytes by range (file, start, stop) that may be in memory when `user` has run
    files     files whose pages come and go as the budget says
    rows      bytes by range of rows and experts that were looked up and stay, the latest last
    """

    nbytes: int
    resident: dict[FileRange, int] = field(default_factory=dict)
    files: set[MappedFile] = field(default_factory=set)
    rows: dict[FileRange, int] = field(default_factory=dict)
    user: object = None


page_budget = ContextVar[PageBudget | None]("page_budget", default=None)  # None: the system decides


@contextmanager
def limited_pages(nbytes: int | None) -> Iterator[None]:
    """`with limited_pages(n):` keeps at most n bytes of mapped files in memory; None leaves that to the system.

    Raises InputError where the system does not let go of pages.
    """
    if nbytes is not None and sys.platform != "linux":
        raise InputError("--resident: only Linux lets a process give back pages of a file")
    outer_budget = page_budget.set(None if nbytes is None else PageBudget(nbytes))
    try:
        yield
    finally:
        page_budget.reset(outer_budget)


def release_pages(array: np.ndarray) -> None:
    """Give the pages of an array back where pages are limited and the array is a view of a file."""
    if page_budget.get() and (file := mapped_file(array)):
        file.release(*file.byte_range(array))


def mapped_file(array: np.ndarray) -> MappedFile | None:
    """Return the file that an array is a view of; None if it has memory of its own."""
    base: object = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return base if isinstance(base, MappedFile) else None
