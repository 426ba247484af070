"""The page of a run in a real browser: it shows the planning, every step, and how the run ended."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import packtrain as pt
from packtrain.common.errors import DoesNotFit
from packtrain.training.monitoring.metrics_file import read
from packtrain.training.monitoring.page_data import RunsPageData
from packtrain.training.monitoring.runs_page import page_with_data
from packtrain.workflows import run_page_server
from tests.browser import chromium
from tests.kill import TINY_FLAGS, sample_text

pytestmark = pytest.mark.browser

SIZES = {"dim": 32, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 48, "ctx": 32}
HIDDEN = 'Object.defineProperty(document, "hidden", { get: () => true })'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page whose errors fail the test."""
    opened, errors = browser.new_page(), list[str]()
    opened.set_default_timeout(30_000)
    opened.on("pageerror", lambda error: errors.append(str(error)))
    yield opened
    opened.close()
    assert not errors


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(sample_text())
    return path


def wait_for_state(page: Any, state: str) -> None:
    page.locator("#state").get_by_text(state, exact=True).wait_for()


def figure_text(page: Any, name: str) -> str:
    place = page.locator("#figures div").filter(has=page.get_by_text(name, exact=True))
    return str(place.locator("dd").inner_text())


@pytest.mark.parametrize("is_hidden", [False, True])
def test_the_page_has_the_planning_and_the_end_of_a_run(
    page: Any, text: Path, tmp_path: Path, is_hidden: bool
) -> None:
    """Also one that nobody sees, as browsers slow it down: it gets its last answer without a timer."""
    output, planned = tmp_path / "m.gguf", list[str]()
    if is_hidden:
        page.add_init_script(HIDDEN)

    def on_message(message: str) -> None:
        if url := re.search(r"http://127\.0\.0\.1:\d+/", message):
            page.goto(url[0])
            wait_for_state(page, "planning …")
        elif "validation: " in message and not is_hidden:
            page.get_by_text(message).wait_for()
            planned.append(message)

    pt.train(
        text, output=output, watch="0", iters=40, steps_per_eval=20, batch_size=2,
        vocab_size=320, on_message=on_message, **SIZES,
    )  # fmt: skip
    wait_for_state(page, "finished")
    *_, last, end = read(tmp_path / "m.run/metrics.jsonl")
    assert planned or is_hidden
    assert (
        figure_text(page, "step").split() == ["40", "of", "40"]
        and last["step"] == end["step"] == 40
    )
    assert figure_text(page, "validation loss").startswith(f"{last['val_loss']:.4f}\n")
    assert figure_text(page, "loss").startswith(f"{last['loss']:.4f}\n")
    assert page.locator("#more").inner_text() == f"{output} is written"
    assert page.locator("#messages").get_by_text("trained 40 steps").is_visible()
    page.evaluate("lost()")
    assert page.locator("#state").get_attribute("class") == "finished"


def test_a_run_that_does_not_fit_says_so_on_its_page(page: Any, text: Path, tmp_path: Path) -> None:
    def on_message(message: str) -> None:
        if url := re.search(r"http://127\.0\.0\.1:\d+/", message):
            page.goto(url[0])
            wait_for_state(page, "planning …")

    with pytest.raises(DoesNotFit) as refused:
        pt.train(
            text, output=tmp_path / "m.gguf", watch="0", memory="2MiB", on_message=on_message, **SIZES
        )  # fmt: skip
    wait_for_state(page, "failed")
    first_line = str(refused.value).splitlines()[0].removesuffix(":").split(" memory")[0]
    # the page names the flag, the session the keyword
    assert page.locator("#more").inner_text().removeprefix("--").startswith(first_line)


def test_a_run_that_is_stopped_says_how_to_go_on(page: Any, text: Path, tmp_path: Path) -> None:
    run_flags = ["-o", str(tmp_path / "m.gguf"), "--iters", "1000000", "--watch", "0"]
    command = [
        sys.executable,
        "-m",
        "packtrain",
        "train",
        "--data",
        str(text),
        *TINY_FLAGS,
        *run_flags,
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        said = next(line for line in run.stderr if "watch the run" in line)
        page.goto(said.split()[-1])
        wait_for_state(page, "running")
        page.wait_for_function("runs.get('m')?.step > 2")
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130
        assert re.search("continue with: .* --resume", run.stderr.read())
    wait_for_state(page, "stopped")
    assert re.search(
        r"continue with: packtrain train .*--resume", page.locator("#more").inner_text()
    )


# ---- without a run


class Server:
    """The server of a page whose run is told by the test."""

    def __init__(self, folder: Path) -> None:
        self.board = RunsPageData(dict, "m", lambda: 0)
        self.watching = run_page_server.import_runs_server().RunsPageServer("0", self.board)
        self.watching.start()
        folder.mkdir()
        self.folder = folder

    def train(self, steps: int) -> None:
        (self.folder / "run.json").write_text(json.dumps({"steps": 9, "title": "tiny"}))
        (self.folder / "run.yaml").write_text("lr: 0.1\n")
        records = [
            {"step": k + 1, "loss": 4.0, "lr": 0.1, "seconds": k + 1.0} for k in range(steps)
        ]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (self.folder / "metrics.jsonl").write_text(lines)
        (self.folder / "samples.jsonl").write_text('{"step": 1, "text": "Once"}\n')
        self.board.show_run(self.folder, lambda: 1)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "m.run")
    yield server
    with suppress(OSError):
        server.watching.close()


def test_a_lost_connection_is_not_an_end(page: Any, server: Server) -> None:
    server.train(5)
    page.goto(server.watching.url)
    wait_for_state(page, "running")
    server.watching.close()
    wait_for_state(page, "connection lost")
    assert page.locator("#state").get_attribute("class") == "lost"
    assert "was killed, or cannot be reached" in page.locator("#more").inner_text()
    assert figure_text(page, "step").split() == ["5", "of", "9"]


def test_the_page_tells_what_is_counted_and_that_the_result_is_written(
    page: Any, server: Server
) -> None:
    server.train(9)
    server.board.current_work = "merging: block 3 of 18"
    with open(server.folder / "metrics.jsonl", "a") as file:
        file.write('{"event": "end", "step": 9}\n')
    page.goto(server.watching.url)
    wait_for_state(page, "all steps are done, writing the result …")
    assert page.locator("#more").inner_text() == "merging: block 3 of 18"


@pytest.mark.parametrize("width", [390, 1120])
def test_what_matters_most_stands_first(page: Any, server: Server, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(server.watching.url)
    wait_for_state(page, "planning …")
    server.board.message("loading")
    page.get_by_text("loading", exact=True).wait_for()  # charts must not be made in another order
    server.train(5)
    wait_for_state(page, "running")
    order = [
        "#progress", "#figures", "#view", "Loss", "Tokens per second", "Memory", "Learning rate", "Samples",
        "Messages", "#plan", "#chosen",
    ]  # fmt: skip
    records = {"tokens_per_second": 9.0, "planned_bytes": 1}
    (server.folder / "run.json").write_text(json.dumps({"steps": 9, "planned_bytes": 1}))
    with open(server.folder / "metrics.jsonl", "a") as file:
        file.write(
            json.dumps({"step": 6, "loss": 3.0, "lr": 0.1, "seconds": 6.0, **records}) + "\n"
        )
    places = [page.locator(name if name[0] == "#" else f"h2:text-is('{name}')") for name in order]
    places[4].wait_for()
    tops = [place.bounding_box()["y"] for place in places]
    assert tops == sorted(tops), dict(zip(order, tops, strict=True))
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_still_page_of_a_run_says_that_it_is_finished(page: Any, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 4.0}\n{"event": "end", "step": 1}\n'
    )
    page.set_content(page_with_data(RunsPageData(lambda: {"m": tmp_path}, "m").data()))
    assert page.locator("#state").inner_text().startswith("finished, as of ")
    assert page.locator("#said").is_hidden() and page.locator("#more").inner_text() == ""
