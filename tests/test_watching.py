"""The page of a run while it goes on, and the comparison of runs: files, HTTP, memory, hostile clients."""

import base64
import contextlib
import hashlib
import http.client
import json
import math
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from packtrain.cli.main import main
from packtrain.common.errors import InputError
from packtrain.common.events import Events
from packtrain.training.monitoring import RunMonitor, metrics_file
from packtrain.training.monitoring.history import MAX_ROWS, MetricSeries, RunHistory
from packtrain.training.monitoring.page_data import RunsPageData
from packtrain.training.monitoring.run_folders import find_runs
from packtrain.training.monitoring.runs_page import live_page, page_with_data
from packtrain.workflows import optional_deps, run_page_server
from tests.kill import TINY_FLAGS, sample_text

HOSTILE = "</script><script>alert(1)</script>\x1b[31m\u202e"


def metrics_line(step: int, loss: float | None = 4.0, **fields: Any) -> str:
    record = {"step": step, "tokens": 10 * step, "loss": loss, "lr": 0.1, "seconds": step / 2}
    return json.dumps(record | fields) + "\n"


def make_run(folder: Path, lines: str, settings: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(lines)
    (folder / "run.yaml").write_text(settings or "lr: 0.1\nseed: 0\n")
    return folder


# ---- series ----------------------------------------------------------------------------------------------------


def test_a_series_of_any_length_keeps_its_means_and_extremes() -> None:
    columns = {"x": "last", "y": "mean", "low": "min", "high": "max", "n": "sum"}
    count = 7 * MAX_ROWS + 13
    series = MetricSeries(columns)
    for k in range(count):
        y = math.nan if k % 5 == 0 else float(k * 37 % 101)
        series.add({"x": k, "y": y, "low": y, "high": y, "n": 1.0}, k + 1)
        assert len(series) <= MAX_ROWS
    first, series_columns = series.columns_since(0)
    expected = [k * 37 % 101 for k in range(count) if k % 5]
    assert first == 0 and series.records_per_row == 8 and sum(series_columns["n"]) == count
    assert series_columns["x"][:3] == [7, 15, 23] and series_columns["x"][-1] == count - 1
    assert (min(series_columns["low"]), max(series_columns["high"])) == (
        min(expected),
        max(expected),
    )
    row_values = [k * 37 % 101 for k in range(8, 16) if k % 5]
    assert series_columns["y"][1] == pytest.approx(sum(row_values) / len(row_values), rel=1e-12)


def test_what_is_new_is_the_end_of_a_series_until_its_rows_are_joined() -> None:
    series = MetricSeries({"x": "last"})
    for k in range(MAX_ROWS):
        series.add({"x": k}, k + 1)
    assert series.columns_since(MAX_ROWS - 2) == (MAX_ROWS - 2, {"x": [MAX_ROWS - 2, MAX_ROWS - 1]})
    assert series.columns_since(MAX_ROWS) == (MAX_ROWS, {"x": []})
    series.add({"x": MAX_ROWS}, MAX_ROWS + 1)
    first, new_columns = series.columns_since(MAX_ROWS)
    assert (first, len(new_columns["x"])) == (0, MAX_ROWS // 2 + 1)


# ---- reading runs ----------------------------------------------------------------------------------------------


def columns(run: RunHistory, part: str = "train") -> dict[str, list[float | None]]:
    return getattr(run, part).columns_since(0)[1]


def test_damaged_lines_are_counted_and_the_last_waits_to_be_whole(tmp_path: Path) -> None:
    bad = [
        "{",
        "[]",
        "[" * 5000,
        '"x"',
        '{"step": "3"}',
        '{"loss": 1}',
        '{"step": -1}',
        "\0\xff",
        "x" * 200_000,
    ]
    lines = [
        metrics_line(1),
        *(f"{text}\n" for text in bad),
        metrics_line(2, None),
        '{"step": 9e999, "loss": 3}\n',
        metrics_line(3, 2.5),
    ]
    folder = make_run(tmp_path / "a.run", "".join(lines) + metrics_line(4)[:-5])
    run = RunHistory(folder, "a")
    run.refresh(1)
    assert columns(run)["step"] == [1, 2, 3] and columns(run)["loss"] == [4.0, None, 2.5]
    assert columns(run)["bad"] == [0, 1, 0]
    assert run.num_damaged >= len(bad) + 1
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(metrics_line(4)[-5:] + metrics_line(5, val_loss=3.5))
    run.refresh(2)
    assert columns(run)["step"] == [1, 2, 3, 4, 5]
    assert columns(run, "valid")["val_loss"] == [3.5]
    figures = run.table_row()
    assert (figures["step"], figures["best_loss"], figures["best_step"]) == (5, 2.5, 3)
    assert json.loads(json.dumps(figures, allow_nan=False))


@pytest.mark.parametrize("new_lines", ["", "".join(metrics_line(k, 9.0) for k in range(4, 60))])
def test_a_resumed_or_replaced_run_is_read_anew(tmp_path: Path, new_lines: str) -> None:
    folder = make_run(tmp_path / "a.run", "".join(metrics_line(k) for k in range(1, 11)))
    run = RunHistory(folder, "a")
    run.refresh(1)
    resumed = metrics_file.MetricsFile(folder / "metrics.jsonl", 3)
    resumed.file.write(new_lines)
    resumed.file.close()
    run.refresh(2)
    assert columns(run)["step"] == [*range(1, 4), *(range(4, 60) if new_lines else ())]
    (folder / "metrics.jsonl").write_text(metrics_line(1, 7.0))
    run.refresh(3)
    assert columns(run)["loss"] == [7.0] and run.table_row()["best_loss"] == 7.0


def test_samples_are_kept_and_cut_when_a_run_is_resumed(tmp_path: Path) -> None:
    with RunMonitor(tmp_path, Events(), tensorboard=False) as watch:
        for step in (1, 2, 3):
            watch.record_step({"step": step, "loss": 1.0})
            watch.record_sample(step, f"text {step}\n{HOSTILE}")
    run = RunHistory(tmp_path, "a")
    run.refresh(1)
    assert [s["step"] for s in run.samples] == [1, 2, 3] and HOSTILE in run.samples[0]["text"]
    with RunMonitor(tmp_path, Events(), tensorboard=False) as watch:
        watch.resume(2)
    run.refresh(2)
    assert [s["step"] for s in run.samples] == [1, 2]
    with RunMonitor(tmp_path, Events(), tensorboard=False) as watch:
        watch.record_step({"step": 1, "loss": 1.0})
    run.refresh(3)
    assert not run.samples


def test_a_board_tells_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.training.monitoring.page_data.REFRESH_SECONDS", 0.0)
    make_run(tmp_path / "a.run", metrics_line(1) + metrics_line(2))
    board = RunsPageData(lambda: find_runs(tmp_path), "runs")
    data = board.data()
    assert data["runs"][0]["settings"] == {"lr": "0.1", "seed": "0"}
    with open(tmp_path / "a.run/metrics.jsonl", "a") as file:
        file.write(metrics_line(3))
    update = board.data(data["version"], data["session"])["runs"][0]
    assert update["train"]["from"] == 2 and update["train"]["columns"]["step"] == [3]
    assert "settings" not in update and "samples" not in update
    assert board.data(data["version"], "another")["runs"][0]["train"]["from"] == 0
    assert board.data(10**9, data["session"])["since"] == 0


def test_a_run_that_ends_right_after_the_first_answer_is_shown(tmp_path: Path) -> None:
    make_run(tmp_path / "a.run", metrics_line(1))
    board = RunsPageData(dict, "a", lambda: 0)
    assert board.data()["runs"] == []
    board.show_run(tmp_path / "a.run", lambda: 1)
    board.end = "finished", "a.gguf is written"
    assert [run["state"] for run in board.data()["runs"]] == ["finished"]


# ---- the table -------------------------------------------------------------------------------------------------


@pytest.fixture
def runs_folder(tmp_path: Path) -> Path:
    make_run(
        tmp_path / "deep/one.run",
        metrics_line(1) + metrics_line(2, 3.0, val_loss=3.25),
        "lr: 0.1\nseed: 0\noutput: a\n",
    )
    end = json.dumps({"event": "end", "step": 4, "planned_bytes": 9, "peak_bytes": 8}) + "\n"
    make_run(
        tmp_path / "two.run",
        "".join(metrics_line(k, 5.0 - k) for k in range(1, 5)) + end,
        "lr: 0.2\nseed: 0\n",
    )
    make_run(tmp_path / "empty.run", "")
    make_run(tmp_path / "damaged.run", "nothing\n{{{\n" + metrics_line(1)[:9], ": [")
    bare_run = tmp_path / "bare.run"
    bare_run.mkdir()
    (bare_run / "run.yaml").write_bytes(b"\xff\xfe")
    (tmp_path / ".hidden.run").mkdir()
    (tmp_path / ".hidden.run/metrics.jsonl").write_text(metrics_line(1))
    return tmp_path


def test_runs_are_compared_as_json(runs_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(runs_folder), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows.keys() == {"deep/one.run", "two.run", "empty.run", "damaged.run", "bare.run"}
    first, second = rows["deep/one.run"], rows["two.run"]
    assert (first["loss"], first["val_loss"], first["best_val_step"]) == (3.0, 3.25, 2)
    assert (second["state"], second["best_loss"], second["peak_bytes"]) == ("done", 1.0, 8)
    assert (second["tokens_per_second"], second["seconds"]) == (20.0, 2.0)
    assert first["settings"] == {"lr": "0.1"} and second["settings"] == {"lr": "0.2"}
    assert rows["empty.run"]["loss"] is None and rows["damaged.run"]["damaged"] == 2


def test_a_speed_counts_computed_tokens(tmp_path: Path) -> None:
    lines = "".join(metrics_line(k, positions_per_second=64.0 * k) for k in (1, 2))
    run = RunHistory(make_run(tmp_path / "a.run", lines), "a")
    run.refresh(1)
    assert run.table_row()["tokens_per_second"] == 96.0  # 32 and 64 tokens in half a second each
    assert run.table_row()["tokens"] == 20


def test_runs_are_compared_as_a_table(
    runs_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", str(runs_folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and lines[0].split()[:2] == ["run", "state"]
    assert lines[0].endswith("lr")
    (two,) = (text for text in lines if text.startswith("two.run"))
    assert {"done", "4", "1.0000", "20", "0:02", "0.2"} <= set(two.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "does not exist"),
        (["."], "has no runs"),
        (["file"], "is a file"),
        ([".", "--html", "nowhere/a.html"], "cannot be written"),
        ([".", "--watch", "x"], "must be a port"),
        ([".", "--watch", "70000"], "must be a port"),
        ([".", "--watch", "no such host:0"], "cannot listen there"),
    ],
)
def test_bad_requests_for_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str],
    words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main(["runs", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


# ---- the page --------------------------------------------------------------------------------------------------


def scripts(text: str) -> list[str]:
    return re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)


def test_the_page_runs_only_its_own_script_and_names_no_other_place(runs_folder: Path) -> None:
    static_page = runs_folder / "page.html"
    assert main(["runs", str(runs_folder), "--html", str(static_page)]) == 0
    live, sent = live_page()
    for text in (live, static_page.read_text()):
        outside = text.replace(scripts(text)[0], "")
        assert "<!--" not in text and "://" not in outside and "xmlns" not in outside
        assert not re.search(r"url\(|@import|\b(src|href|style|on\w+)=", outside)
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function\(", text
        )
        policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
        assert policy and "default-src 'none'" in policy[1] and "unsafe" not in policy[1]
        (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
        for kind, part in (("style", style), ("script", scripts(text)[1])):
            seal = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
            assert f"{kind}-src 'sha256-{seal}'" in policy[1]
    assert "connect-src 'self'" in sent and "connect-src" not in static_page.read_text()
    data = json.loads(scripts(static_page.read_text())[0])
    (entry,) = (run for run in data["runs"] if run["name"] == "deep/one.run")
    assert entry["train"]["columns"]["loss"] == [4.0, 3.0]


def test_hostile_names_settings_and_samples_stay_text(tmp_path: Path) -> None:
    name = "</script><script>alert(1)<"
    folder = make_run(
        tmp_path / "x" / name.replace("/", "|"), metrics_line(1), f"lr: {json.dumps(HOSTILE)}\n"
    )
    (folder / "samples.jsonl").write_text(json.dumps({"step": 1, "text": HOSTILE}) + "\n")
    text = page_with_data(RunsPageData(lambda: find_runs(tmp_path), HOSTILE).data())
    assert len(scripts(text)) == 2 and not set("<>&") & set(scripts(text)[0])
    run = json.loads(scripts(text)[0])["runs"][0]
    assert run["settings"]["lr"] == HOSTILE and run["samples"][0]["text"] == HOSTILE


# ---- a run that is watched -------------------------------------------------------------------------------------


class WatchedRun:
    """A training run in a process, and the address of its page."""

    def __init__(self, data: Path, output: Path, *flags: str) -> None:
        arguments = [
            "train",
            "--data",
            str(data),
            "-o",
            str(output),
            *TINY_FLAGS,
            "--watch",
            "0",
            *flags,
        ]
        self.output = output
        command = [sys.executable, "-m", "packtrain", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.said: list[str] = []
        assert self.process.stderr is not None
        for text in self.process.stderr:
            self.said.append(text)
            match = re.search(r"watch the run at http://127\.0\.0\.1:(\d+)/", text)
            if match:
                self.port = int(match[1])
                break
        else:
            raise AssertionError(self.said)
        self._reading = threading.Thread(target=lambda: self.said.extend(self.process.stderr or ()))
        self._reading.start()

    def get(self, path: str, host: str = "localhost") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", path, headers={"Host": host})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def data(self) -> dict[str, Any]:
        payload: dict[str, Any] = json.loads(self.get("/data")[1])
        return payload

    def until(self, step: int) -> dict[str, Any]:
        """The data once so many steps are done."""
        while self.process.poll() is None:
            with contextlib.suppress(OSError):
                data = self.data()
                if data["runs"] and data["runs"][0]["step"] >= step:
                    return data
        raise AssertionError(self.said)

    def wait_for_exit(self) -> int:
        code = self.process.wait(120)
        self._reading.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    @property
    def records(self) -> list[dict[str, Any]]:
        return metrics_file.read(self.output.with_suffix(".run") / "metrics.jsonl")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(sample_text())
    return path


@pytest.fixture
def watching(text: Path, tmp_path: Path) -> Iterator[Any]:
    running: list[WatchedRun] = []

    def begin(*flags: str) -> WatchedRun:
        running.append(WatchedRun(text, tmp_path / "m.gguf", *flags))
        return running[-1]

    yield begin
    for watched in running:
        watched.process.kill()
        watched.wait_for_exit()


def test_a_run_is_seen_while_it_goes_on_and_keeps_to_its_memory(watching: Any) -> None:
    """With clients that stall, go away, or ask for nonsense; their number is limited."""
    args = ["--iters", "400", "--memory", "100MiB", "--steps-per-eval", "20"]
    run = watching(*args, "--sample-every", "10", "--sample-prompt", "The")
    stalled = [socket.create_connection(("127.0.0.1", run.port)) for _ in range(8)]
    for client in stalled[:4]:
        client.sendall(b"GET /data HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)
    stalled[4].sendall(b"\0\xff nonsense\r\n\r\n")
    data = run.until(25)
    (seen,) = data["runs"]
    records = [r for r in run.records if r["step"] <= seen["step"]]
    for name in ("step", "loss", "lr", "seconds"):
        assert seen["train"]["columns"][name] == [r[name] for r in records]
    assert seen["valid"]["columns"]["step"][0] == 20 and seen["steps"] == 400
    assert seen["state"] == "running" and seen["left"] > 0
    assert seen["samples"][0]["step"] == 10 and seen["samples"][0]["text"].startswith("The")
    assert seen["settings"]["iters"] == "400" and "watch" not in seen["settings"]
    rows = sum(nbytes for _, nbytes, _ in seen["about"]["rows"])
    assert (
        rows
        == seen["planned_bytes"]
        >= data["memory"]["peak"]
        >= data["memory"]["now"] - (1 << 20)
        > 0
    )
    code, page = run.get("/")
    assert code == 200 and page.decode() == live_page()[0]
    assert b"<canvas" in run.get("/plan?run=m")[1]
    for path in ("/plan", "/plan?run=..", "/plan?run=%2e%2e%2fm", "/metrics.jsonl", "/../run.yaml"):
        assert run.get(path)[0] == 404, path
    assert run.get("/data?since=x&session=y")[0] == run.get("/data?since=" + "9" * 99)[0] == 200
    assert run.get("/data", host="elsewhere.example")[0] == 400
    assert run.wait_for_exit() == 0, run.said
    end = run.records[-1]
    assert end["event"] == "end" and end["peak_bytes"] <= end["planned_bytes"] <= 100 << 20
    for client in stalled:
        client.close()


def test_ctrl_c_saves_and_ends_a_watched_run(watching: Any) -> None:
    run = watching("--iters", "100000")
    stalled = socket.create_connection(("127.0.0.1", run.port))
    stalled.sendall(b"GET /data HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
    run.until(5)
    run.process.send_signal(signal.SIGINT)
    assert run.wait_for_exit() == 130
    assert "--resume" in run.said[-1] and "Traceback" not in "".join(run.said)
    with pytest.raises(OSError):
        run.get("/data")
    stalled.close()


def test_a_run_that_is_refused_ends_its_page(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "--data", str(text), "-o", str(tmp_path / "m.gguf"), *TINY_FLAGS]
    # kernels' threads, which may start here, stay
    assert main([*arguments, "--memory", "2MiB"]) == 3
    before = threading.active_count()
    assert main([*arguments, "--watch", "0", "--memory", "2MiB"]) == 3
    assert threading.active_count() == before
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert main([*arguments, "--watch", str(port)]) == 2
    error = capsys.readouterr().err
    assert f"--watch {port}: cannot listen there: " in error and "another port" in error


def test_without_the_extra_it_says_what_to_install(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        optional_deps, "find_spec", lambda name: None if name == "uvicorn" else object()
    )
    arguments = ["--data", str(text), "-o", str(tmp_path / "m.gguf"), *TINY_FLAGS, "--watch", "0"]
    for command in (["train"], ["plan", "train"]):
        assert main([*command, *arguments]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.endswith(
            "--watch needs uvicorn: pip install uvicorn (or packtrain with its extra server)"
        )
    (tmp_path / "runs").mkdir()
    assert main(["runs", str(tmp_path / "runs"), "--watch", "0"]) == 2


def test_the_memory_of_the_page_is_in_the_plan(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own each, as the server is loaded only once."""
    totals = []
    for watch_args in ([], ["--watch", "0"]):
        path = tmp_path / f"plan{len(watch_args)}.json"
        arguments = [
            "plan",
            "train",
            "--data",
            str(text),
            *TINY_FLAGS,
            "--json",
            str(path),
            *watch_args,
        ]
        subprocess.run(
            [sys.executable, "-m", "packtrain", *arguments], check=True, capture_output=True
        )
        totals.append(json.loads(path.read_text())["baseline_bytes"])
    assert totals[1] - totals[0] > run_page_server.PAGE_NBYTES


def test_addresses() -> None:
    address = run_page_server.import_runs_server().parse_address
    assert address("0") == ("127.0.0.1", 0) and address("0.0.0.0:80") == ("0.0.0.0", 80)
    assert address("[::1]:8080") == ("::1", 8080)
    for wrong in ("", "x", ":80", "-1", "1e3", "localhost:", "a:b", "65536", "\u0661"):
        with pytest.raises(InputError, match="must be a port"):
            address(wrong)


def test_runs_are_compared_live(runs_folder: Path) -> None:
    command = [sys.executable, "-m", "packtrain", "runs", str(runs_folder), "--watch", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        port = int(re.findall(r":(\d+)/", process.stderr.readline())[0])
        run = WatchedRun.__new__(WatchedRun)
        run.port = port
        data = run.data()
        assert len(data["runs"]) == 5 and data["differing"] == ["lr"] and data["memory"] is None
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0 and "Traceback" not in process.stderr.read()
