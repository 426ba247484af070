"""Ctrl-C and SIGTERM as a flag that is checked between steps; a second Ctrl-C stops at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """`with stop_on_signals() as stopped:` yields a function that returns whether a signal has arrived.

    Training calls it between steps; generation passes it to the executor, which calls it between ops (`stop=`).
    A second signal raises KeyboardInterrupt wherever the program is. A closed terminal (SIGHUP) counts, too, unless it
    is ignored as under nohup. Main thread only, as Python's signals are.
    """
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield lambda: came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
