"""A heartbeat: notices a rank that hangs or was cut off as surely as one that was killed.

Each rank counts up a number in the store that all can read, and watches the number of the rank before it. The first
rank that finds another silent writes down who was lost, for all. A timeout cannot tell a rank that hangs from rank 0
writing a large file for minutes. Ending the process at once is safe: no file is half written under its own name."""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

BEAT_SECONDS = 1.0
SILENT_SECONDS = 15.0  # a rank is lost after so many seconds without a beat
HURRY_SECONDS = 4.0  # likewise, after a connection has broken: only the lost rank is unknown
GRACE_SECONDS = 3.0  # seconds for this rank's work to see the loss, before the process ends
WATCH_SECONDS = 0.25
LOST_KEY, HEARD_KEY, BEAT_PREFIX = "packtrain/lost", "packtrain/heard", "packtrain/beat/"
PARENT_VARIABLE = "PACKTRAIN_PARENT"  # id of the process that started the ranks; they end with it
RESUME = "the last checkpoint is whole, go on with --resume"


class Heartbeat:
    """Beats for this rank and watches the rank before it; `lost_reason`: a sentence, who was lost and why, or None.

    store_keeper  who keeps the store, in words for messages, such as "rank 0"
    """

    def __init__(self, rank: int, world_size: int, store_keeper: str) -> None:
        self.rank, self.world_size, self.store_keeper = rank, world_size, store_keeper
        self.lost_reason: str | None = None
        # the clock of this process, which stands still while the process itself is stopped
        self.lost_seconds = self.clock = 0.0
        self.watched_rank = (rank - 1) % world_size
        self.patience, self.grace_seconds = SILENT_SECONDS, GRACE_SECONDS
        self.is_listening = True
        self.stop_event = threading.Event()
        self.lost_event = threading.Event()
        self.answered: float | None = None  # when the store last answered
        self.beat_thread: threading.Thread | None = None
        self.parent_pid = int(os.environ.get(PARENT_VARIABLE, 0))
        threading.Thread(target=self._watch_ranks, daemon=True).start()

    def start_beating(self, connect: Callable[[], Any]) -> None:
        """Begin to beat and to watch; connect() returns a new connection to the store, for the beating thread."""
        self.answered = self.clock
        self.beat_thread = threading.Thread(target=self._send_beats, args=(connect(),), daemon=True)
        self.beat_thread.start()

    def wait_for_loss(self, seconds: float) -> str | None:
        """Set the patience to HURRY_SECONDS, wait at most `seconds` for a loss; return who was lost, or None."""
        self.patience = HURRY_SECONDS
        self.lost_event.wait(seconds)
        return self.lost_reason

    def close(self, store: Any) -> None:
        """End this rank's beats and tell the rank that watches them, so that nobody misses this rank."""
        self.grace_seconds += 2 * GRACE_SECONDS  # this rank is already ending
        self.stop_event.set()
        if self.beat_thread is not None:
            self.beat_thread.join(GRACE_SECONDS)
            if not self.lost_reason and not self.beat_thread.is_alive():
                store.set(f"{BEAT_PREFIX}{self.rank}", "done")

    def report_end(self, store: Any, reason: str) -> None:
        """Tell the other ranks, through the store, why this rank ends."""
        self.is_listening = False  # it would hear its own message
        publish_loss(store, f"rank {self.rank} has ended: {reason}")

    def wait_for_listeners(self, store: Any) -> None:
        """On rank 0 (it may hold the store), if the run failed: wait GRACE_SECONDS at most until all ranks know why."""
        deadline_seconds = time.monotonic() + GRACE_SECONDS
        while self.rank == 0 and store.check([LOST_KEY]) and time.monotonic() < deadline_seconds:
            if store.add(HEARD_KEY, 0) == self.world_size - 1:
                return
            time.sleep(WATCH_SECONDS)

    # ---- two threads: one may have to wait for the store, the other never waits

    def _send_beats(self, store: Any) -> None:
        """Count up this rank's beats in the store, watch those of the rank before, and publish a loss."""
        beat_count, heard_seconds, last_beat = 0, self.clock, b""
        try:
            while not self.stop_event.wait(BEAT_SECONDS):
                beat_count += 1
                store.set(f"{BEAT_PREFIX}{self.rank}", str(beat_count))
                if self.is_listening and self.lost_reason is None and store.check([LOST_KEY]):
                    self._record_loss(store.get(LOST_KEY).decode())
                    store.add(HEARD_KEY, int(self.rank > 0))
                beat = f"{BEAT_PREFIX}{self.watched_rank}"
                now_seconds, seen = self.clock, store.get(beat) if store.check([beat]) else b""
                self.answered = now_seconds
                if seen != last_beat or seen == b"done":
                    heard_seconds, last_beat = now_seconds, seen
                elif now_seconds - heard_seconds > self.patience:
                    publish_loss(store, self._silence_message(f"rank {self.watched_rank}"))
        except RuntimeError:
            self._record_loss(f"{self.store_keeper} was lost: its connection has ended; {RESUME}")

    def _watch_ranks(self) -> None:
        """Record a lost parent, or a store that is silent; end the process some time after any loss is known."""
        previous_seconds = time.monotonic()
        while self.lost_reason or not self.stop_event.is_set():
            time.sleep(WATCH_SECONDS)
            now_seconds = time.monotonic()
            self.clock += min(now_seconds - previous_seconds, 4 * WATCH_SECONDS)
            previous_seconds = now_seconds
            if self.parent_pid and os.getppid() != self.parent_pid:
                self._record_loss(f"the process that started the ranks was lost; {RESUME}")
            if self.answered is not None and self.clock - self.answered > SILENT_SECONDS:
                self._record_loss(self._silence_message(self.store_keeper))
            if self.lost_reason and self.clock - self.lost_seconds > self.grace_seconds:
                with suppress(OSError, ValueError):
                    print(f"packtrain: error: {self.lost_reason}", file=sys.stderr, flush=True)
                os._exit(1)  # its other threads may wait for what never comes

    def _silence_message(self, who: str) -> str:
        return f"{who} was lost: nothing was heard of it for {self.patience:.0f} seconds; {RESUME}"

    def _record_loss(self, reason: str) -> None:
        if self.lost_reason is None:
            self.lost_reason, self.lost_seconds = reason, self.clock
            self.lost_event.set()


def publish_loss(store: Any, reason: str) -> str:
    """Write into the store why the run ends, unless a rank has done so before; return the reason that stands there."""
    return bytes(store.compare_set(LOST_KEY, "", reason)).decode()
