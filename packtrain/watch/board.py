"""What a page shows of one run or of all runs below a folder, as plain data, and what has changed since it asked."""

import json
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from packtrain.memory import private_nbytes
from packtrain.watch.history import History
from packtrain.watch.runs import differing

EACH = 0.5  # seconds for which what was read is kept, however many clients ask
FIND = 5.0  # seconds between two looks for new runs


class Board:
    """Runs for pages.

    find   the folders of runs by name
    title  of the page
    peak   peak bytes of this process so far, if it is the one that trains; then there is one run
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

    def refresh(self) -> None:
        """Read what is new, unless that was just done."""
        now = time.monotonic()
        if now - self._read < EACH:
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
        self._read = time.monotonic()

    def _kept(self, name: str, folder: Path) -> History | None:
        run = self.runs.get(name)
        return run if run is not None and run.folder == folder else None

    def data(self, since: int = 0, session: str = "") -> dict[str, Any]:
        """All of the page's data, or what is new since the version that another answer of this session had."""
        self.refresh()
        if session != self.session or since > self.version:
            since = 0
        one = len(self.runs) == 1 and self.peak is not None
        return {
            "session": self.session,
            "version": self.version,
            "since": since,
            "title": self.title,
            "live": self.peak is not None,
            "now": time.time(),
            "differing": differing(self.runs.values()),
            "memory": {"now": private_nbytes(), "peak": self.peak()} if one and self.peak else None,
            "runs": [self._changes(run, since) for run in self.runs.values()],
        }

    def text(self, since: int = 0, session: str = "") -> bytes:
        return json.dumps(
            self.data(since, session), separators=(",", ":"), allow_nan=False
        ).encode()

    def _changes(self, run: History, since: int) -> dict[str, Any]:
        found: dict[str, Any] = run.figures()
        if self.peak is not None and run.end is None:
            found["state"] = "running"
        for name, series in (("train", run.train), ("valid", run.valid)):
            first, columns = series.since(since)
            found[name] = {"from": first, "width": series.width, "columns": columns}
        if run.settings_version > since:
            found |= {"settings": run.settings, "about": run.about}
        if run.samples_version > since or not since:
            found["samples"] = list(run.samples)
        return found
