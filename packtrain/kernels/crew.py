"""The threads of compiled code, and the words of memory that they share. `pool` is the compiled part.

Loads neither numba nor NumPy. The words exist once in a process, however its kernels are loaded.
"""

import contextlib
import ctypes
import os
import platform
import sys
import threading
from collections.abc import Callable

from packtrain.kernels.runtime import most_threads

REST = {"x86_64": "pause", "aarch64": "yield"}  # tells the core that a thread only waits
AVAILABLE = sys.platform == "linux" and platform.machine() in REST
COUNT = most_threads()

# words of what all threads share, each line of the cache with what changes together
LINE = 8
BUSY, OPEN, INSIDE, REGION, WAITING, USED = (LINE * i for i in range(6))
TASK, GIVEN, THREADS, NUMBER, CREW = (REGION + i for i in range(5))
GATE = WAITING + 1  # a semaphore: where the first thread sleeps
OWN, NEXT, END, TIME, ASLEEP, BED = 8 * LINE, 0, 1, 2, LINE, LINE + 1  # of each thread
SIZE = 2 * LINE

room = (ctypes.c_int64 * (OWN + SIZE * COUNT + LINE))()
first = -ctypes.addressof(room) % (8 * LINE)
words = (ctypes.c_int64 * (OWN + SIZE * COUNT)).from_buffer(room, first)
ADDRESS = ctypes.addressof(words)
words[USED] = COUNT


def threads() -> int:
    """The number of threads that kernels use."""
    return int(words[USED])


def set_threads(count: int) -> None:
    """Use `count` threads, at most as many as the pool has; results do not depend on it."""
    if not 1 <= count <= COUNT:
        raise ValueError(f"set_threads: count ({count}) must lie between 1 and {COUNT}")
    words[USED] = count
    if not AVAILABLE and "numba" in sys.modules:
        sys.modules["numba"].set_num_threads(count)


def start(serve: Callable[[int], None]) -> None:
    """Start all threads but the first, each on its core, unless they have been started."""
    if words[CREW]:
        return
    cores = sorted(os.sched_getaffinity(0))

    def live(thread: int) -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {cores[thread % len(cores)]})
        serve(thread)

    for thread in range(1, COUNT):
        threading.Thread(target=live, args=(thread,), daemon=True).start()
    words[CREW] = COUNT - 1
    os.register_at_fork(after_in_child=forget)


def forget() -> None:
    """A forked child has one thread."""
    used = words[USED]
    ctypes.memset(ADDRESS, 0, ctypes.sizeof(words))
    words[USED] = used
