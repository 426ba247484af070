"""The page of a run while it goes on (--watch): its server, and the memory that a plan must count for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from packtrain.tasks.extra import check_server
from packtrain.training.settings import RunSettings
from packtrain.watch.board import Board

ROOM_NBYTES = 5 << 20  # for answers; 3.7 MiB were measured with 15 stalled clients
STARTED_NBYTES = 1 << 20  # by which a server that runs is larger than one that is loaded


class Page:
    """Shows a run from when its folder is its own; before, that it is being planned."""

    def __init__(self, server: Any = None) -> None:
        self._server = server

    def show(self, folder: Path, peak: Callable[[], int]) -> None:
        if self._server is not None:
            self._server.board = Board(lambda: {folder.stem: folder}, folder.stem, peak)


def serving() -> Any:
    """The module that serves pages, loaded. Raises InputError without the extra `server`."""
    check_server("--watch")
    return import_module("packtrain.serving.watching")


@contextmanager
def watched(settings: RunSettings, say: Callable[[str], None]) -> Iterator[Page]:
    """Serve the page of a run, if it is asked for. Raises InputError."""
    if settings.watch is None:
        yield Page()
        return
    server = serving().Watching(settings.watch, Board(dict, settings.folder.stem, lambda: 0))
    server.start()
    say(f"watch the run at {server.url}")
    try:
        yield Page(server)
    finally:
        server.close()


@contextmanager
def room(settings: RunSettings, runs: bool) -> Iterator[None]:
    """The memory of the page is taken inside this block, so that a plan made there counts it."""
    if settings.watch is None:
        yield
        return
    serving()
    held = bytearray(b"\1") * (ROOM_NBYTES + (0 if runs else STARTED_NBYTES))
    yield
    del held
