"""The threads of compiled code, and the words of memory that they share. `work_stealing` is the compiled part.

Loads neither numba nor NumPy. The words exist once in a process, however its kernels are loaded.
"""

import contextlib
import ctypes
import os
import platform
import sys
import threading
from collections.abc import Callable

from packtrain.kernels.runtime.environment import max_threads

REST = {"x86_64": "pause", "aarch64": "yield"}  # tells the core that a thread only waits
HAS_THREAD_POOL = sys.platform == "linux" and platform.machine() in REST
MAX_THREADS = max_threads()

# places of the shared words; words that change together share a line of the cache
LINE = 8
IS_BUSY, OPEN, INSIDE, REGION_WORDS, WAITING, USED = (LINE * i for i in range(6))
TASK, TASK_ARGS, REGION_THREADS, NUMBER, NUM_STARTED = (REGION_WORDS + i for i in range(5))
MAIN_SEMAPHORE = WAITING + 1  # semaphore of the first thread
THREAD_WORDS, NEXT, END, TIME, IS_ASLEEP, BED = 8 * LINE, 0, 1, 2, LINE, LINE + 1  # per thread
SIZE = 2 * LINE

room = (ctypes.c_int64 * (THREAD_WORDS + SIZE * MAX_THREADS + LINE))()
first = -ctypes.addressof(room) % (8 * LINE)
shared_words = (ctypes.c_int64 * (THREAD_WORDS + SIZE * MAX_THREADS)).from_buffer(room, first)
WORDS_ADDRESS = ctypes.addressof(shared_words)
shared_words[USED] = MAX_THREADS


def threads() -> int:
    """Return the number of threads that kernels use."""
    return int(shared_words[USED])


def set_threads(count: int) -> None:
    """Let kernels use `count` threads, at most as many as the pool has; results do not depend on the number."""
    if not 1 <= count <= MAX_THREADS:
        raise ValueError(f"set_threads: count ({count}) must lie between 1 and {MAX_THREADS}")
    shared_words[USED] = count
    if not HAS_THREAD_POOL and "numba" in sys.modules:
        sys.modules["numba"].set_num_threads(count)


def start_threads(serve_tasks: Callable[[int], None]) -> None:
    """Start all threads but the first, each on its core, with serve_tasks(number), unless they have been started."""
    if sys.platform != "linux" or shared_words[NUM_STARTED]:
        return
    cores = sorted(os.sched_getaffinity(0))

    def run_thread(thread_index: int) -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {cores[thread_index % len(cores)]})
        serve_tasks(thread_index)

    for thread_index in range(1, MAX_THREADS):
        threading.Thread(target=run_thread, args=(thread_index,), daemon=True).start()
    shared_words[NUM_STARTED] = MAX_THREADS - 1
    os.register_at_fork(after_in_child=reset_after_fork)


def reset_after_fork() -> None:
    """Clear the shared words in a forked child, which has only one thread."""
    num_threads = shared_words[USED]
    ctypes.memset(WORDS_ADDRESS, 0, ctypes.sizeof(shared_words))
    shared_words[USED] = num_threads
