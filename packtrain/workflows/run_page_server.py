"""The page of a run while it goes on (--watch): its server, its events, and the memory that a plan counts for it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from packtrain.common.errors import Interrupted
from packtrain.common.events import Counted, Events
from packtrain.training.monitoring.page_data import RunsPageData
from packtrain.training.run_settings import RunSettings
from packtrain.workflows.optional_deps import check_server

PAGE_NBYTES = 5 << 20  # memory for answers; 3.7 MiB were measured with 15 stalled clients
STARTUP_NBYTES = 1 << 20  # memory that a loaded server takes when it starts
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"  # how a run ends


ShowRun = Callable[[Path, Callable[[], int]], None]
ReportEnd = Callable[[Path, bool], None]  # the output, and whether the run was stopped


class PageEvents(Events):
    """Events of a run that also show messages and counts on the run's page."""

    def __init__(self, events: Events, board: RunsPageData) -> None:
        own_names = vars(PageEvents)
        passed_on = (name for name in vars(Events) if name[0] != "_" and name not in own_names)
        vars(self).update({event_name: getattr(events, event_name) for event_name in passed_on})
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
    def counting(self, label: str, unit: str) -> Iterator[Counted]:
        def report_on_page(done: int, num_total: int, *texts: str) -> None:
            self.board.current_work = f"{label}: {unit} {done:,} of {num_total:,}"
            report_progress(done, num_total, *texts)

        with self.events.counting(label, unit) as report_progress:
            try:
                yield report_on_page
            finally:
                self.board.current_work = ""


def import_runs_server() -> Any:
    """Load the module that serves pages. Raises InputError without the extra `server`."""
    check_server("--watch")
    return import_module("packtrain.serving.runs_server")


@contextmanager
def watched(settings: RunSettings, events: Events) -> Iterator[tuple[Events, ShowRun, ReportEnd]]:
    """Serve the page of a run if --watch is set; yields (events, `show_run`, `report_end`). Raises InputError.

    The run calls `show_run` when its folder belongs to it, and `report_end` at the end; an exception is an end, too.
    Open pages get the end before the server closes.
    """
    board = RunsPageData(dict, settings.folder.stem, lambda: 0)

    def report_end(output_path: Path, is_stopped: bool) -> None:
        finished_end = FINISHED, f"{output_path} is written"
        board.end = (STOPPED, ["", *board.messages][-1]) if is_stopped else finished_end

    if settings.watch is None:
        yield events, board.show_run, report_end
        return
    page_server = import_runs_server().RunsPageServer(settings.watch, board)
    page_server.start()
    events.message(f"watch the run at {page_server.url}")
    try:
        yield PageEvents(events, board), board.show_run, report_end
    except (KeyboardInterrupt, Interrupted) as error:
        board.end = STOPPED, str(error) or "stopped at once, without saving"
        raise
    except BaseException as error:
        board.end = FAILED, str(error) or type(error).__name__
        raise
    finally:
        page_server.close()


@contextmanager
def reserve_page_memory(settings: RunSettings, will_run: bool) -> Iterator[None]:
    """Hold as many bytes as the page will need during the block, so that a plan made there counts them."""
    if settings.watch is None:
        yield
        return
    import_runs_server().parse_address(settings.watch)  # raises InputError for a bad address
    placeholder = bytearray(b"\1") * (PAGE_NBYTES + (0 if will_run else STARTUP_NBYTES))
    yield
    del placeholder
