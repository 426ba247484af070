"""Private memory: bytes that belong to one process and cannot be dropped and read again from a file.

Measured for this process, for another one with its children, and as the peak during a block. On
Linux that is RssAnon + RssShmem of /proc/<pid>/status, which the kernel keeps (walking smaps takes ten times as
long), elsewhere psutil's USS. Files that are only mapped for reading, such as a GGUF's weights, do not count.
"""

import contextlib
import ctypes
import gc
import os
import re
import threading
from pathlib import Path

import psutil

from packtrain.common.errors import InputError

COUNTERS = re.compile(rb"^Rss(?:Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)
SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?B|[KMGTB]|%)", re.IGNORECASE)
UNITS = {
    "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "kib": 1 << 10, "mib": 1 << 20,
    "gib": 1 << 30, "tib": 1 << 40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
SAMPLE_SECONDS = 0.02  # a sample takes 0.2 ms including the wake-up: 1 % of a core


def _status(pid: int) -> bytes:
    """/proc/<pid>/status of a process; empty if there is none."""
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
    """Private memory of a process and all its descendants, seen from outside; 0 after it has ended.

    A child between fork and exec still shares its parent's memory, which is not counted twice.
    """
    try:
        root = psutil.Process(pid)
        command, nbytes = root.cmdline(), _private_nbytes(pid)
        family = root.children(recursive=True)
    except psutil.Error:
        return 0
    for process in family:
        with contextlib.suppress(psutil.Error):
            is_counted = process.cmdline() != command
            nbytes += _private_nbytes(process.pid) if is_counted else 0
    return nbytes


def settle() -> None:
    """Return freed memory to the system, so that the next measurement counts only what is in use."""
    gc.collect()
    give_back()


def give_back() -> None:
    """Return freed memory to the system, but for objects in cycles."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:  # glibc
        trim(0)


class Peak:
    """`with Peak() as peak:` samples private memory in a thread; `peak.nbytes` is the maximum so far.

    baseline  private memory when the block began
    Memory held for less than SAMPLE_SECONDS may be missed.
    """

    def __init__(self) -> None:
        self.baseline = self.nbytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory peak", daemon=True)

    def __enter__(self) -> "Peak":
        self.baseline = self.nbytes = private_nbytes()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._sample()

    def _sample(self) -> None:
        self.nbytes = max(self.nbytes, private_nbytes())

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self._sample()


def parse_size(text: str, field: str) -> int:
    """Bytes of a size such as 1.5GiB, 800MiB, 65536KiB or 80% of the memory of this machine. Raises InputError."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{field}: {text!r} is not a size; give one such as 2GiB, 800MiB or 80%")
    number, unit = float(match[1]), match[2].lower()
    if unit == "%":
        if not 0 < number <= 100:
            raise InputError(f"{field}: {text} must be more than 0% and at most 100%")
        return int(total_nbytes() * number / 100)
    nbytes = number * UNITS[unit]
    if not 1 << 20 <= nbytes <= 1 << 60:
        amount = "much" if nbytes > 1 << 20 else "little"
        raise InputError(f"{field}: {text} is too {amount}; it must be from 1MiB to 1048576TiB")
    return int(nbytes)


def total_nbytes() -> int:
    """Memory of this machine, or the limit of its control group."""
    total = int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total
