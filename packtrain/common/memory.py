"""Private memory: bytes that belong to one process and cannot be dropped and read again from a file.

Measures this process, another process, and the peak during a block. On Linux private memory is
RssAnon + RssShmem of /proc/<pid>/status, which the kernel keeps (walking smaps takes ten times as long), elsewhere
psutil's USS. Files that are only mapped for reading, such as a GGUF's weights, do not count.
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

RSS_LINE = re.compile(rb"^Rss(?:Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)
SIZE_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?B|[KMGTB]|%)", re.IGNORECASE)
UNIT_NBYTES = {
    "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "kib": 1 << 10, "mib": 1 << 20,
    "gib": 1 << 30, "tib": 1 << 40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
SAMPLE_SECONDS = 0.02  # a sample takes 0.2 ms including the wake-up: 1 % of a core


def _read_status(pid: int) -> bytes:
    """Return /proc/<pid>/status; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return b""


HAS_RSS_COUNTERS = RSS_LINE.search(_read_status(os.getpid())) is not None


def private_nbytes(pid: int = 0) -> int:
    """Return the private memory of a process in bytes, by default of this one; 0 after the process has ended."""
    pid = pid or os.getpid()
    if HAS_RSS_COUNTERS:
        return 1024 * sum(map(int, RSS_LINE.findall(_read_status(pid))))
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except psutil.Error:
        return 0


def release_memory() -> None:
    """Return freed memory to the system, so that the next measurement counts only bytes in use."""
    gc.collect()
    trim_heap()


def trim_heap() -> None:
    """Return freed memory to the system, without collecting objects in cycles first."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:  # glibc
        trim(0)


class MemoryPeak:
    """`with MemoryPeak() as peak:` samples private memory in a thread; `peak.nbytes` is the maximum so far.

    baseline  private memory when the block began
    Memory held for less than SAMPLE_SECONDS may be missed.
    """

    def __init__(self) -> None:
        self.baseline = self.nbytes = 0
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="memory peak", daemon=True)

    def __enter__(self) -> "MemoryPeak":
        self.baseline = self.nbytes = private_nbytes()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop_event.set()
        self._thread.join()
        self._update_peak()

    def _update_peak(self) -> None:
        self.nbytes = max(self.nbytes, private_nbytes())

    def _poll(self) -> None:
        """Measure every SAMPLE_SECONDS, in a thread, until stopped."""
        while not self._stop_event.wait(SAMPLE_SECONDS):
            self._update_peak()


def parse_size(text: str, field: str) -> int:
    """Return the bytes of 1.5GiB, 800MiB, 65536KiB or 80% (of this machine). Raises InputError on setting `field`."""
    match = SIZE_PATTERN.fullmatch(text.strip())
    if match is None:
        raise InputError(f"{field}: {text!r} is not a size; give one such as 2GiB, 800MiB or 80%")
    quantity, unit = float(match[1]), match[2].lower()
    if unit == "%":
        if not 0 < quantity <= 100:
            raise InputError(f"{field}: {text} must be more than 0% and at most 100%")
        return int(total_nbytes() * quantity / 100)
    nbytes = quantity * UNIT_NBYTES[unit]
    if not 1 << 20 <= nbytes <= 1 << 60:
        adjective = "much" if nbytes > 1 << 20 else "little"
        raise InputError(f"{field}: {text} is too {adjective}; it must be from 1MiB to 1048576TiB")
    return int(nbytes)


def total_nbytes() -> int:
    """Return the bytes of memory of this machine, or of its control group's limit, if that is less."""
    machine_nbytes = int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError, ValueError):
        machine_nbytes = min(machine_nbytes, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return machine_nbytes


def machine_memory() -> dict[str, int]:
    """Return bytes of this machine's memory: total, available, and the limit of the control group, if that is less."""
    memory = psutil.virtual_memory()
    return {"total": memory.total, "available": memory.available, "limit": total_nbytes()}
