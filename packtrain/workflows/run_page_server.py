"""The page of a run while it goes on (--watch): its server, what the run tells it, and the memory that a plan must
count for it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from packtrain.common.errors import Interrupted
from packtrain.common.events import Counted, Events
from packtrain.training.monitoring.page_data import Board
from packtrain.training.train_settings import RunSettings
from packtrain.workflows.optional_deps import check_server

ROOM_NBYTES = 5 << 20  # for answers; 3.7 MiB were measured with 15 stalled clients
STARTED_NBYTES = 1 << 20  # by which a server that runs is larger than one that is loaded
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"  # how a run ends


Show = Callable[[Path, Callable[[], int]], None]
Ended = Callable[[Path, bool], None]  # the output, and whether the run was stopped


class Told(Events):
    """Events of a run that tell its page, too, what the run says and counts."""

    def __init__(self, events: Events, board: Board) -> None:
        passed_on = (name for name in vars(Events) if name[0] != "_" and name not in vars(Told))
        vars(self).update({name: getattr(events, name) for name in passed_on})
        self.events, self.board = events, board

    def message(self, text: str) -> None:
        self.board.message(text)
        self.events.message(text)

    def notice(self, text: str) -> None:
        self.board.message(text)
        self.events.notice(text)

    def answers(self, answers: Sequence[Any]) -> None:
        for a in answers:
            self.board.message(f"question: {a.question}\n  base: {a.base}\n  tuned: {a.tuned}")
        self.events.answers(answers)

    def plan(self, run_plan: Any) -> None:
        self.board.message(run_plan.ended or "\n".join([str(run_plan), *run_plan.notes]))
        self.events.plan(run_plan)

    @contextmanager
    def counting(self, label: str, part: str) -> Iterator[Counted]:
        def counted(done: int, total: int, *texts: str) -> None:
            self.board.doing = f"{label}: {part} {done:,} of {total:,}"
            count(done, total, *texts)

        with self.events.counting(label, part) as count:
            try:
                yield counted
            finally:
                self.board.doing = ""


def serving() -> Any:
    """The module that serves pages, loaded. Raises InputError without the extra `server`."""
    check_server("--watch")
    return import_module("packtrain.serving.runs_server")


@contextmanager
def watched(settings: RunSettings, events: Events) -> Iterator[tuple[Events, Show, Ended]]:
    """Serve the page of a run, if it is asked for: events to tell it by, and two functions. Raises InputError.

    Whoever trains calls the first when the run's folder is its own, and the second at the end; what is raised here is
    an end, too. Pages that are open get the end before the server goes.
    """
    board = Board(dict, settings.folder.stem, lambda: 0)

    def ended(output: Path, stopped: bool) -> None:
        wrote = FINISHED, f"{output} is written"
        board.end = (STOPPED, ["", *board.messages][-1]) if stopped else wrote

    if settings.watch is None:
        yield events, board.show, ended
        return
    server = serving().Watching(settings.watch, board)
    server.start()
    events.message(f"watch the run at {server.url}")
    try:
        yield Told(events, board), board.show, ended
    except (KeyboardInterrupt, Interrupted) as error:
        board.end = STOPPED, str(error) or "stopped at once, without saving"
        raise
    except BaseException as error:
        board.end = FAILED, str(error) or type(error).__name__
        raise
    finally:
        server.close()


@contextmanager
def room(settings: RunSettings, runs: bool) -> Iterator[None]:
    """The memory of the page is taken inside this block, so that a plan made there counts it."""
    if settings.watch is None:
        yield
        return
    serving().address(settings.watch)  # refuses what is none
    placeholder = bytearray(b"\1") * (ROOM_NBYTES + (0 if runs else STARTED_NBYTES))
    yield
    del placeholder
