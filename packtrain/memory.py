"""Private memory: the bytes that belong to a process alone and cannot be dropped and read again from a file.

Out come bytes, for this process, for another one with its children, and the most that was seen during a block. On
Linux that is RssAnon + RssShmem of /proc/<pid>/status, which the kernel keeps (walking smaps takes ten times as
long), elsewhere psutil's USS. Files that are only mapped for reading, such as a GGUF's weights, do not count.
"""

import ctypes
import gc
import os
import re
import threading
from types import TracebackType

import psutil

COUNTERS = re.compile(rb"^Rss(?:Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)
SAMPLE_SECONDS = 0.02  # a sample takes 0.2 ms with waking up: 1 % of a core


def _status(pid: int) -> bytes:
    """The kernel's page about a process; nothing where there is none."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return b""


KERNEL_COUNTS = COUNTERS.search(_status(os.getpid())) is not None


def _private_nbytes(pid: int) -> int:
    if KERNEL_COUNTS:
        return 1024 * sum(map(int, COUNTERS.findall(_status(pid))))
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except psutil.Error:
        return 0


def private_nbytes() -> int:
    """Private memory of this process, now."""
    return _private_nbytes(os.getpid())


def private_nbytes_of(pid: int) -> int:
    """Private memory of a process and all its descendants, seen from outside; 0 once it has ended."""
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(_private_nbytes(process.pid) for process in family)


def settle() -> None:
    """Give back what is free but still held, so that what is measured next is what is needed."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:  # glibc
        trim(0)


class Peak:
    """`with Peak() as peak:` samples private memory in a thread; `peak.nbytes` is the most so far.

    baseline  private memory when the block began
    What lives for less than SAMPLE_SECONDS may be missed.
    """

    def __init__(self) -> None:
        self.baseline = self.nbytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory peak", daemon=True)

    def __enter__(self) -> "Peak":
        self.baseline = self.nbytes = private_nbytes()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._sample()

    def _sample(self) -> None:
        self.nbytes = max(self.nbytes, private_nbytes())

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self._sample()
