"""What a page shows of one run or of all runs below a folder, as plain data, and what has changed since it asked."""

import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from packtrain.common.memory import private_nbytes
from packtrain.training.monitoring.history import History, printed
from packtrain.training.monitoring.run_folders import differing

EACH = 0.5  # seconds for which what was read is kept, however many clients ask
FIND = 5.0  # seconds between two looks for new runs
MAX_MESSAGES = 50  # the newest


class Board:
    """Runs for pages.

    find   the folders of runs by name
    title  of the page
    peak   peak bytes of this process so far, if it is the one that trains; then there is one run, none while it is
           planned
    doing  the work that the run counts at this moment, such as a validation; empty: none
    end    how that run ended: finished, stopped or failed, and a sentence
    """

    def __init__(
        self,
        find: Callable[[], Mapping[str, Path]],
        title: str,
        peak: Callable[[], int] | None = None,
    ) -> None:
        self.find, self.title, self.peak = find, title, peak
        self.session, self.version = secrets.token_hex(8), 0
        self.runs = dict[str, History]()
        self._read = self._found = -1e9
        self.doing, self._end_is_read = "", False
        self.end: tuple[str, str] | None = None
        self.messages, self._num_messages = deque[str](maxlen=MAX_MESSAGES), 0
        self._messages_seen = (0, 0)  # their number, and the version that had them first

    # ---- told by the run, from its thread

    def show(self, folder: Path, peak: Callable[[], int]) -> None:
        """The run is planned, and its folder is its own from here on."""
        self.find, self.peak = (lambda: {folder.stem: folder}), peak

    def message(self, text: str) -> None:
        self.messages.append(printed(text))
        self._num_messages += 1

    # ---- asked by pages

    def refresh(self) -> None:
        """Read what is new, unless that was just done; at the end of a run in any case."""
        now, is_ended = time.monotonic(), self.end is not None
        if now - self._read < EACH and self._end_is_read == is_ended:
            return
        if now - self._found >= (EACH if self.peak else FIND):
            folders = self.find()
            self.runs = {
                name: self._kept(name, folder) or History(folder, name) for name, folder in folders.items()
            }  # fmt: skip
            self._found = now
        self.version += 1
        for run in self.runs.values():
            run.refresh(self.version)
        if self._messages_seen[0] != self._num_messages:
            self._messages_seen = self._num_messages, self.version
        self._read, self._end_is_read = time.monotonic(), is_ended

    def _kept(self, name: str, folder: Path) -> History | None:
        run = self.runs.get(name)
        return run if run is not None and run.folder == folder else None

    def data(self, since: int = 0, session: str = "") -> dict[str, Any]:
        """All of the page's data, or what is new since the version that another answer of this session had."""
        self.refresh()
        if session != self.session or since > self.version:
            since = 0
        is_single_run = len(self.runs) == 1 and self.peak is not None
        return {
            "session": self.session,
            "version": self.version,
            "since": since,
            "title": self.title,
            "live": self.peak is not None,
            "now": time.time(),
            "differing": differing(self.runs.values()),
            "memory": {"now": private_nbytes(), "peak": self.peak()}
            if is_single_run and self.peak
            else None,
            "doing": self.doing,
            "end": self.end,
            "messages": list(self.messages)
            if self._messages_seen[1] > since or not since
            else None,
            "runs": [self._changes(run, since) for run in self.runs.values()],
        }

    def text(self, since: int = 0, session: str = "") -> bytes:
        return json.dumps(
            self.data(since, session), separators=(",", ":"), allow_nan=False
        ).encode()

    def _changes(self, run: History, since: int) -> dict[str, Any]:
        changes: dict[str, Any] = run.figures()
        if self.peak is not None:
            changes["state"] = (
                self.end[0] if self.end else "running" if run.end is None else "finishing"
            )
        for name, series in (("train", run.train), ("valid", run.valid)):
            first, columns = series.since(since)
            changes[name] = {"from": first, "width": series.width, "columns": columns}
        if run.settings_version > since:
            changes |= {"settings": run.settings, "about": run.about}
        if run.samples_version > since or not since:
            changes["samples"] = list(run.samples)
        return changes
