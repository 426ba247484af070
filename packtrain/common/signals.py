"""Ctrl-C and SIGTERM as a flag that is checked between steps; a second Ctrl-C stops at once."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """`with stop_on_interrupt() as should_stop:` should_stop() is true after Ctrl-C, or a notebook's stop button. In
    other threads than the main one should_stop() is never true."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    with stop_on_signals([signal.SIGINT]) as should_stop:
        yield should_stop


@contextmanager
def stop_on_signals(numbers: Sequence[int] = ()) -> Iterator[Callable[[], bool]]:
    """`with stop_on_signals() as should_stop:` should_stop() returns whether a signal has arrived.

    numbers  signal numbers; default: Ctrl-C, SIGTERM and a closed terminal (SIGHUP), unless ignored as under nohup
    Training calls should_stop between steps, the executor between ops (`stop=`). A second signal raises
    KeyboardInterrupt wherever the program is. Main thread only, as Python's signals are.
    """
    signals = list[int]()

    def note(signal_number: int, frame: FrameType | None) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(signal_number)

    default_signals = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        default_signals.append(signal.SIGHUP)
    old_handlers = {number: signal.signal(number, note) for number in numbers or default_signals}
    try:
        yield partial(bool, signals)
    finally:
        for signal_number, handler in old_handlers.items():
            signal.signal(signal_number, handler)
