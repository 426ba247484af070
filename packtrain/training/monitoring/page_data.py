"""Data of the runs page: one run or all runs below a folder as plain data, or only changes since a version."""

import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from packtrain.common.memory import private_nbytes
from packtrain.training.monitoring.history import RunHistory, clipped_text
from packtrain.training.monitoring.run_folders import differing_settings

REFRESH_SECONDS = 0.5  # seconds between two readings, however many clients ask
SEARCH_SECONDS = 5.0  # seconds between two looks for new runs
MAX_MESSAGES = 50  # newest messages that are shown


class RunsPageData:
    """The runs that a page shows, read from their folders.

    find_runs        returns the folders of runs by name
    title            title of the page
    get_peak_nbytes  returns this process's peak bytes if it trains the only run, which is unknown until it is planned
    current_work     the work that the run counts at this moment, such as a validation; empty: none
    end              how that run ended: finished, stopped or failed, and a sentence
    """

    def __init__(
        self, find_runs: Callable[[], Mapping[str, Path]], title: str, get_peak_nbytes: Callable[[], int] | None = None,
    ) -> None:  # fmt: skip
        self.find_runs, self.title, self.get_peak_nbytes = find_runs, title, get_peak_nbytes
        self.session, self.version = secrets.token_hex(8), 0
        self.runs = dict[str, RunHistory]()
        self._read_time = self._found_time = -1e9
        self.current_work, self._is_end_read = "", False
        self.end: tuple[str, str] | None = None
        self.messages, self._num_messages = deque[str](maxlen=MAX_MESSAGES), 0
        self._messages_version = (0, 0)  # number of messages, and the version that had them first

    # ---- called by the run, from its thread

    def show_run(self, folder: Path, get_peak_nbytes: Callable[[], int]) -> None:
        """Show, from here on, only this process's run in `folder`; get_peak_nbytes() returns the process's peak."""
        self.find_runs, self.get_peak_nbytes = (lambda: {folder.stem: folder}), get_peak_nbytes
        self._found_time = -1e9  # a run shorter than REFRESH_SECONDS is seen, too

    def message(self, text: str) -> None:
        self.messages.append(clipped_text(text))
        self._num_messages += 1

    # ---- called by pages

    def refresh(self) -> None:
        """Read what the runs have written, at most once per REFRESH_SECONDS, and again when the watched run ends."""
        now, is_ended = time.monotonic(), self.end is not None
        if now - self._read_time < REFRESH_SECONDS and self._is_end_read == is_ended:
            return
        if now - self._found_time >= (REFRESH_SECONDS if self.get_peak_nbytes else SEARCH_SECONDS):
            folders = self.find_runs()
            self.runs = {
                name: self._run_in_folder(name, folder) or RunHistory(folder, name) for name, folder in folders.items()
            }  # fmt: skip
            self._found_time = now
        self.version += 1
        for run in self.runs.values():
            run.refresh(self.version)
        if self._messages_version[0] != self._num_messages:
            self._messages_version = self._num_messages, self.version
        self._read_time, self._is_end_read = time.monotonic(), is_ended

    def _run_in_folder(self, name: str, folder: Path) -> RunHistory | None:
        run = self.runs.get(name)
        return run if run is not None and run.folder == folder else None

    def data(self, since_version: int = 0, session: str = "") -> dict[str, Any]:
        """Return the page's data as plain JSON: all, or if `session` is the current one, changes since that version."""
        self.refresh()
        if session != self.session or since_version > self.version:
            since_version = 0
        get_peak_nbytes = self.get_peak_nbytes if len(self.runs) == 1 else None
        return {
            "session": self.session, "version": self.version, "since": since_version, "title": self.title,
            "live": self.get_peak_nbytes is not None, "now": time.time(),
            "differing": differing_settings(self.runs.values()),
            "memory": get_peak_nbytes and {"now": private_nbytes(), "peak": get_peak_nbytes()},
            "doing": self.current_work, "end": self.end,
            "messages": list(self.messages)
            if self._messages_version[1] > since_version or not since_version
            else None,
            "runs": [self._changes_since(run, since_version) for run in self.runs.values()],
        }  # fmt: skip

    def json_bytes(self, since_version: int = 0, session: str = "") -> bytes:
        return json.dumps(
            self.data(since_version, session), separators=(",", ":"), allow_nan=False
        ).encode()

    def _changes_since(self, run: RunHistory, since_version: int) -> dict[str, Any]:
        changes: dict[str, Any] = run.table_row()
        if self.get_peak_nbytes is not None:
            changes["state"] = (
                self.end[0] if self.end else "running" if run.end_record is None else "finishing"
            )
        for name, series in (("train", run.train), ("valid", run.valid)):
            first_row, columns = series.columns_since(since_version)
            changes[name] = {"from": first_row, "width": series.records_per_row, "columns": columns}
        if run.settings_version > since_version:
            changes |= {"settings": run.settings, "about": run.about}
        if run.samples_version > since_version or not since_version:
            changes["samples"] = list(run.samples)
        return changes
