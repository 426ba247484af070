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
Show = Callable[[Path, Callable[[], int]], None]  # show(folder, peak of memory)
STARTED_NBYTES = 1 << 20  # by which a server that runs is larger than one that is loaded


def serving() -> Any:
    """The module that serves pages, loaded. Raises InputError without the extra `server`."""
    check_server("--watch")
    return import_module("packtrain.serving.watching")


@contextmanager
def watched(settings: RunSettings, say: Callable[[str], None]) -> Iterator[Show]:
    """Serve the page of a run, if it is asked for; `show` a run from when its folder is its own. Raises InputError."""
    if settings.watch is None:
        yield lambda folder, peak: None
        return
    server = serving().Watching(settings.watch, Board(dict, settings.folder.stem, lambda: 0))

    def show(folder: Path, peak: Callable[[], int]) -> None:
        server.board = Board(lambda: {folder.stem: folder}, folder.stem, peak)

    server.start()
    say(f"watch the run at {server.url}")
    try:
        yield show
    finally:
        server.close()


@contextmanager
def room(settings: RunSettings, runs: bool) -> Iterator[None]:
    """The memory of the page is taken inside this block, so that a plan made there counts it."""
    if settings.watch is None:
        yield
        return
    serving().address(settings.watch)  # refuses what is none
    held = bytearray(b"\1") * (ROOM_NBYTES + (0 if runs else STARTED_NBYTES))
    yield
    del held
