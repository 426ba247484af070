"""A heartbeat: a rank that hangs, or whose connection is cut without a word, is noticed as one that was killed is.

Each rank counts up a number in the store that all can read, and watches that of the rank before it. The first that
finds another silent writes down who was lost, for all.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

BEAT_SECONDS = 1.0
SILENT_SECONDS = 15.0  # without a beat: lost
HURRY_SECONDS = 4.0  # the same when a connection has broken: who it was is all that is asked
GRACE_SECONDS = 3.0  # for the rank's own work to see that another is lost; then the process ends
WATCH_SECONDS = 0.25
LOST, HEARD, BEAT = "packtrain/lost", "packtrain/heard", "packtrain/beat/"
PARENT = "PACKTRAIN_PARENT"  # the process that started the ranks and takes them with it
RESUME = "the last checkpoint is whole, go on with --resume"


class Heart:
    """Of this rank. `lost` is None, or a sentence: who was lost, and why.

    connect  makes a connection of its own to the store
    keeper   who keeps the store
    """

    def __init__(self, rank: int, size: int, keeper: str) -> None:
        self.rank, self.size, self.keeper = rank, size, keeper
        self.lost: str | None = None
        self.lost_at = self.clock = (
            0.0  # of this process, which does not count while it is stopped itself
        )
        self.before = (rank - 1) % size
        self.patience, self.grace = SILENT_SECONDS, GRACE_SECONDS
        self.hears = True
        self.ended = threading.Event()
        self.found = threading.Event()
        self.answered: float | None = None  # when the store last did
        self.beating: threading.Thread | None = None
        self.parent = int(os.environ.get(PARENT, 0))
        threading.Thread(target=self._watch, daemon=True).start()

    def beat(self, connect: Callable[[], Any]) -> None:
        """Begin to beat, and to hear the others."""
        self.answered = self.clock
        self.beating = threading.Thread(target=self._beat, args=(connect(),), daemon=True)
        self.beating.start()

    def wait(self, seconds: float) -> str | None:
        """Who was lost, as soon as it is known."""
        self.patience = HURRY_SECONDS
        self.found.wait(seconds)
        return self.lost

    def close(self, store: Any) -> None:
        """This rank ends, and is not missed."""
        self.grace += 2 * GRACE_SECONDS  # it is on its way
        self.ended.set()
        if self.beating is not None:
            self.beating.join(GRACE_SECONDS)
            if not self.lost and not self.beating.is_alive():
                store.set(f"{BEAT}{self.rank}", "done")

    def tell(self, store: Any, reason: str) -> None:
        """Let the others know why this rank ends."""
        self.hears = False  # what it says itself
        publish(store, f"rank {self.rank} has ended: {reason}")

    def linger(self, store: Any) -> None:
        """Rank 0 may keep the store: if the run has failed, it stays until the others know why."""
        until = time.monotonic() + GRACE_SECONDS
        while self.rank == 0 and store.check([LOST]) and time.monotonic() < until:
            if store.add(HEARD, 0) == self.size - 1:
                return
            time.sleep(WATCH_SECONDS)

    # ---- two threads: one that may have to wait for the store, and one that never waits

    def _beat(self, store: Any) -> None:
        number, heard, last = 0, self.clock, b""
        try:
            while not self.ended.wait(BEAT_SECONDS):
                number += 1
                store.set(f"{BEAT}{self.rank}", str(number))
                if self.hears and self.lost is None and store.check([LOST]):
                    self._lose(store.get(LOST).decode())
                    store.add(HEARD, int(self.rank > 0))
                beat = f"{BEAT}{self.before}"
                now, seen = self.clock, store.get(beat) if store.check([beat]) else b""
                self.answered = now
                if seen != last or seen == b"done":
                    heard, last = now, seen
                elif now - heard > self.patience:
                    publish(store, self._silent(f"rank {self.before}"))
        except RuntimeError:
            self._lose(f"{self.keeper} was lost: its connection has ended; {RESUME}")

    def _watch(self) -> None:
        before = time.monotonic()
        while self.lost or not self.ended.is_set():
            time.sleep(WATCH_SECONDS)
            now = time.monotonic()
            self.clock += min(now - before, 4 * WATCH_SECONDS)
            before = now
            if self.parent and os.getppid() != self.parent:
                self._lose(f"the process that started the ranks was lost; {RESUME}")
            if self.answered is not None and self.clock - self.answered > SILENT_SECONDS:
                self._lose(self._silent(self.keeper))
            if self.lost and self.clock - self.lost_at > self.grace:
                with suppress(OSError, ValueError):
                    print(f"packtrain: error: {self.lost}", file=sys.stderr, flush=True)
                os._exit(1)  # its other threads may wait for what never comes

    def _silent(self, who: str) -> str:
        return f"{who} was lost: nothing was heard of it for {self.patience:.0f} seconds; {RESUME}"

    def _lose(self, reason: str) -> None:
        if self.lost is None:
            self.lost, self.lost_at = reason, self.clock
            self.found.set()


def publish(store: Any, reason: str) -> str:
    """Write down why the run ends, for all ranks; returns what the first rank that did wrote."""
    return bytes(store.compare_set(LOST, "", reason)).decode()
