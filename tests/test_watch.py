"""Watching a run: what is written reads back, resuming leaves no trace of what it drops, and lines say what is so."""

import io
import json
import math
import os
import pty
import re
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from packtrain.cli.event_output import TerminalEvents
from packtrain.common.errors import InputError
from packtrain.common.memory import MemoryPeak
from packtrain.common.text import clock
from packtrain.training.generic.fit_loop import Epoch
from packtrain.training.generic.fit_result import Result
from packtrain.training.monitoring import RunMonitor
from packtrain.training.monitoring.curve import BINS, LossCurve, round_ticks, running_mean
from packtrain.training.monitoring.metrics_file import read
from packtrain.training.monitoring.progress import mean_text, validation_text
from packtrain.training.monitoring.progress_bar import MIN_BAR_COLUMNS, fit_parts

MIB = 1 << 20


def metrics_record(step: int, **changes: float) -> dict[str, float]:
    metrics = {"seconds": step / 7, "tokens_per_second": 1e5 / 3, "grad_norm": 0.834, "lr": 1e-3}
    return metrics | {"loss": 3 + 1 / step, "tokens": 1024 * step, "step": step} | changes


@contextmanager
def watching(
    folder: Path, stream: io.StringIO | None = None, **changes: Any
) -> Iterator[RunMonitor]:
    settings = {"steps": 30, "planned_nbytes": 140 * MIB, "report_every": 10} | changes
    tensorboard = settings.pop("tensorboard", True)
    display = TerminalEvents(stream or io.StringIO())
    with (
        display.training(**settings),
        RunMonitor(folder, display, tensorboard=tensorboard) as watch,
    ):
        watch.peak = MemoryPeak()  # one that measures nothing
        watch.peak.nbytes = 131 * MIB
        yield watch


def run_steps(watch: RunMonitor, first: int, last: int) -> None:
    for step in range(first, last + 1):
        watch.record_step(metrics_record(step))


# ---- metrics.jsonl -------------------------------------------------------------------------------------------


def test_metrics_read_back_equal_in_fixed_order(tmp_path: Path) -> None:
    records = [
        metrics_record(1),
        metrics_record(2, val_loss=math.pi, val_error=1e-300),
        metrics_record(3, loss=5e-324),
    ]
    with watching(tmp_path) as watch:
        for metrics in records:
            watch.record_step(metrics)
        watch.record_end({"planned_bytes": 3, "peak_bytes": 2, "baseline_bytes": 1})
    restored = read(tmp_path / "metrics.jsonl")
    end = {"event": "end", "planned_bytes": 3, "peak_bytes": 2, "baseline_bytes": 1}
    assert restored == [*records, end]
    order = ["step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"]
    assert list(restored[0]) == order and list(restored[1]) == [*order, "val_loss", "val_error"]


def test_a_line_is_there_as_soon_as_its_step_is(tmp_path: Path) -> None:
    with watching(tmp_path) as watch:
        watch.record_step(metrics_record(1))
        assert read(tmp_path / "metrics.jsonl") == [metrics_record(1)]


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    with watching(tmp_path) as watch:
        watch.record_step(metrics_record(1, loss=math.nan, grad_norm=math.inf))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=refuse)["loss"] is None
    assert math.isnan(read(tmp_path / "metrics.jsonl")[0]["grad_norm"])


def test_resuming_keeps_lines_up_to_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with watching(tmp_path) as watch:
        run_steps(watch, 1, 30)
        watch.record_end({"peak_bytes": 1})
    with watching(tmp_path) as watch:
        watch.resume(20)
        assert [r["step"] for r in read(path)] == list(range(1, 21))
        run_steps(watch, 21, 30)
        watch.record_end({"peak_bytes": 2})
    assert read(path) == [*map(metrics_record, range(1, 31)), {"event": "end", "peak_bytes": 2}]


@pytest.mark.parametrize("torn", [b'{"step": 5, "lo', b'{"step": 5}', b"\0" * 20, b"\0\n\xff\n{"])
def test_resuming_drops_an_unfinished_end(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    with watching(tmp_path) as watch:
        run_steps(watch, 1, 4)
    with open(path, "ab") as file:
        file.write(torn)
    assert len(read(path)) == 4
    with watching(tmp_path) as watch:
        watch.resume(4)
        run_steps(watch, 5, 6)
    assert read(path) == [*map(metrics_record, range(1, 7))]


def test_a_bad_line_that_others_follow_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n[2]\n{"step": 3}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl: line 2 is not a JSON object"):
        read(path)


def test_resuming_without_files_begins_them(tmp_path: Path) -> None:
    with watching(tmp_path) as watch:
        watch.resume(7)
        run_steps(watch, 8, 9)
        watch.save()
    assert [r["step"] for r in read(tmp_path / "metrics.jsonl")] == [8, 9]


def test_a_new_run_begins_all_files_anew(tmp_path: Path) -> None:
    for steps in (5, 3):
        with watching(tmp_path) as watch:
            run_steps(watch, 1, steps)
    assert len(read(tmp_path / "metrics.jsonl")) == 3
    assert len(event_files(tmp_path)) == 1 and len(scalars(tmp_path)["loss"]) == 3


# ---- TensorBoard: an independent reader ----------------------------------------------------------------------


def crc32c(data: bytes) -> int:
    """Bit by bit: the remainder of the polynomial division, as RFC 3720 has it."""
    crc = 0xFFFFFFFF
    for byte in data:
        for bit in range(8):
            low = (crc ^ byte >> bit) & 1
            crc = crc >> 1 ^ (0x82F63B78 if low else 0)
    return crc ^ 0xFFFFFFFF


def masked_crc(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) % (1 << 32)


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        size = {1: 8, 5: 4}.get(key & 7)
        if key & 7 == 0:
            value, at = varint(data, at)
            yield key >> 3, value
            continue
        if size is None:
            size, at = varint(data, at)
        raw, at = data[at : at + size], at + size
        yield key >> 3, struct.unpack({1: "<d", 5: "<f"}[key & 7], raw)[0] if key & 7 != 2 else raw


def event_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("events.out.tfevents.*"))


def events(path: Path) -> Iterator[dict[int, Any]]:
    """Events of a file by field number, each with both checksums right."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        body = data[at + 12 : at + 12 + size]
        assert struct.unpack_from("<I", data, at + 8) == (masked_crc(data[at : at + 8]),)
        assert struct.unpack_from("<I", data, at + 12 + size) == (masked_crc(body),)
        yield dict(fields(body))
        at += size + 16


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Values by tag and step, as TensorBoard has them: a start of a session drops its step and all later ones."""
    series: dict[str, dict[int, float]] = {}
    for path in event_files(folder):
        for event in events(path):
            if 7 in event and dict(fields(event[7])) == {1: 1}:
                series = {
                    t: {s: v for s, v in vs.items() if s < event[2]} for t, vs in series.items()
                }
            for _, value in fields(event.get(5, b"")):
                parts = dict(fields(value))
                series.setdefault(parts[1].decode(), {})[event[2]] = parts[2]
    return series


def test_the_checksum_is_the_known_one() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def test_events_hold_the_scalars(tmp_path: Path) -> None:
    start_time = time.time()
    with watching(tmp_path, steps=300) as watch:
        run_steps(watch, 1, 299)
        watch.record_step(metrics_record(300, val_loss=2.5, loss=math.nan))
        watch.record_end({"peak_bytes": 1})
    first_event, *later_events = events(event_files(tmp_path)[0])
    assert first_event[3] == b"brain.Event:2"
    assert all(start_time - 1 < event[1] < time.time() + 1 for event in later_events)
    series = scalars(tmp_path)
    assert set(series) == {"loss", "val_loss", "lr", "grad_norm", "tokens_per_second"}
    assert series["val_loss"] == {300: 2.5} and math.isnan(series["loss"].pop(300))
    assert series["loss"] == {step: np.float32(3 + 1 / step) for step in range(1, 300)}


def test_events_of_a_resumed_run_drop_what_is_later(tmp_path: Path) -> None:
    with watching(tmp_path) as watch:
        run_steps(watch, 1, 20)
    for begin in (10, 12):
        with watching(tmp_path) as watch:
            watch.resume(begin)
            watch.record_step(metrics_record(begin + 1, loss=float(begin)))
    losses = scalars(tmp_path)["loss"]
    assert len(event_files(tmp_path)) == 3
    assert list(losses) == [*range(1, 12), 13]  # nobody recorded step 12 again
    assert losses[11] == 10 and losses[13] == 12


def test_without_tensorboard_there_are_no_events(tmp_path: Path) -> None:
    with watching(tmp_path, tensorboard=False) as watch:
        run_steps(watch, 1, 2)
    assert event_files(tmp_path) == []


# ---- the loss curve ------------------------------------------------------------------------------------------


def draw_curve(*records: dict[str, float]) -> ElementTree.Element:
    curve = LossCurve()
    for metrics in records:
        curve.add(metrics)
    return ElementTree.fromstring(curve.svg())


def find_tags(picture: ElementTree.Element, tag: str) -> list[ElementTree.Element]:
    return picture.findall(f".//{{http://www.w3.org/2000/svg}}{tag}")


def picture_text(picture: ElementTree.Element) -> str:
    return " ".join("".join(text.itertext()) for text in find_tags(picture, "text"))


def line_points(line: ElementTree.Element) -> np.ndarray:
    return np.array([point.split(",") for point in line.attrib["points"].split()], float)


def test_a_curve_shows_the_losses() -> None:
    losses = [4.0, 3.0, 2.0]
    picture = draw_curve(*({"step": i, "loss": loss} for i, loss in enumerate(losses, 1)))
    (x, y) = line_points(find_tags(picture, "polyline")[1]).T
    # a straight line, to a tenth of a pixel
    assert np.ptp(np.diff(x)) < 0.2 and np.ptp(np.diff(y)) < 0.2
    assert np.diff(x)[0] > 0 and np.diff(y)[0] > 0  # down the page
    labels = {t.text: float(t.attrib["y"]) - 4 for t in find_tags(picture, "text")}
    assert np.allclose([labels["4.0"], labels["3.0"], labels["2.0"]], y, atol=0.2)
    assert "training loss" in picture_text(picture) and "validation" not in picture_text(picture)
    assert find_tags(picture, "rect")[0].attrib["fill"] == "#fff"


@pytest.mark.parametrize("steps", [BINS, BINS + 1, 2 * BINS, 10_007])
def test_a_long_run_is_thinned_and_keeps_its_spikes(steps: int) -> None:
    losses = 3 + np.random.default_rng(0).random(steps)
    losses[steps // 3] = 9.0
    curve = LossCurve()
    for step, loss in enumerate(losses.tolist(), 1):
        curve.add({"step": step, "loss": loss})
    assert curve.bin_counts.sum() == steps and curve.bin_sums.sum() == pytest.approx(losses.sum())
    lines = find_tags(ElementTree.fromstring(curve.svg()), "polyline")
    outline, mean = line_points(lines[0]), line_points(lines[1])
    assert BINS / 2 <= len(mean) <= BINS and len(outline) <= 1000
    spike = outline[outline[:, 1].argmin()]
    assert spike[0] == pytest.approx(60 + 664 * (steps // 3) / steps, abs=664 / len(mean) + 0.1)
    assert mean[:, 1].min() > spike[1]


def test_validation_and_losses_that_are_not_finite_are_marked() -> None:
    nan = [{"step": 3, "loss": math.nan}, {"step": 4, "loss": math.inf}]
    picture = draw_curve(
        metrics_record(1),
        metrics_record(2, val_loss=3.25),
        *nan,
        metrics_record(5, val_loss=math.nan),
    )
    assert len(find_tags(picture, "circle")) == 1
    assert "validation loss, last 3.2500" in picture_text(picture) and "not finite" in picture_text(
        picture
    )
    assert sum(p.attrib.get("stroke") == "#dc2626" for p in find_tags(picture, "path")) == 2
    assert "nan" not in ElementTree.tostring(picture).decode()


def test_pictures_of_next_to_nothing() -> None:
    assert "no finite loss yet" in picture_text(draw_curve())
    assert "no finite loss yet" in picture_text(draw_curve({"step": 1, "loss": math.nan}))
    assert len(find_tags(draw_curve({"step": 1, "loss": 0.0}), "circle")) == 1
    assert len(find_tags(draw_curve({"step": 0, "val_loss": 1e-9}), "circle")) == 1


def test_a_resumed_run_has_the_curve_of_an_uninterrupted_one(tmp_path: Path) -> None:
    for name, legs in {"whole": [(1, 30)], "parts": [(1, 25), (11, 30)]}.items():
        (tmp_path / name).mkdir()
        for first_step, last in legs:
            with watching(tmp_path / name) as watch:
                if first_step > 1:
                    watch.resume(first_step - 1)
                run_steps(watch, first_step, last)
                watch.save()
    uninterrupted, resumed = (
        (tmp_path / name / "loss.svg").read_text() for name in ("whole", "parts")
    )
    assert uninterrupted == resumed


def test_ticks_are_round() -> None:
    assert round_ticks(2.1, 10.3, 7, 0.0) == ([4, 6, 8, 10], 0)
    ticks, decimals = round_ticks(3.02, 3.11, 7, 0.0)
    assert [f"{t:.{decimals}f}" for t in ticks] == ["3.02", "3.04", "3.06", "3.08", "3.10"]
    assert round_ticks(0, 2, 8, 1.0) == ([0, 1, 2], 0)
    assert round_ticks(0, 1000, 8, 1.0)[0] == [0, 200, 400, 600, 800, 1000]


def test_running_mean() -> None:
    assert running_mean(np.array([1.0, 4.0, 1.0, 4.0, 9.0]), 1).tolist() == [1, 2, 3, 14 / 3, 9]
    assert running_mean(np.array([1.0, 4.0]), 0).tolist() == [1, 4]


# ---- progress ------------------------------------------------------------------------------------------------


def test_plain_lines(tmp_path: Path) -> None:
    stream = io.StringIO()
    with watching(tmp_path, stream, steps=25) as watch:
        run_steps(watch, 1, 14)
        watch.record_step(metrics_record(15, val_loss=3.2))
        watch.events.message("a line")
        run_steps(watch, 16, 25)
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "line", "20/25", "25/25"]
    assert lines[0] == (
        "step 1/25  loss 4.0000  lr 1.0e-03  norm 0.834  33,333 tokens/s  memory: peak 131, plan 140 MiB"
    )
    losses = [3 + 1 / step for step in range(11, 21)]
    mean, error = np.mean(losses), np.std(losses, ddof=1) / np.sqrt(10)
    expected = (
        f"step 20/25  loss {mean:.4f}±{error:.4f}  val 3.2000 (step 15)  lr 1.0e-03  norm 0.834"
    )
    assert lines[3] == f"{expected}  33,333 tokens/s  eta 0:00  memory: peak 131, plan 140 MiB"


def test_a_validation_of_this_step_is_not_marked_as_old(tmp_path: Path) -> None:
    stream = io.StringIO()
    with watching(tmp_path, stream, steps=3, report_every=1) as watch:
        watch.record_step(metrics_record(1, val_loss=3.2))
        watch.record_step(metrics_record(2))
        watch.record_step(metrics_record(3, val_loss=3.1))
    vals = [line.partition("val ")[2].partition("  ")[0] for line in stream.getvalue().splitlines()]
    assert vals == ["3.2000", "3.2000 (step 1)", "3.1000"]


def test_a_limit_is_named_beside_peak_and_plan(tmp_path: Path) -> None:
    stream = io.StringIO()
    with watching(tmp_path, stream, limit_nbytes=1 << 30) as watch:
        run_steps(watch, 1, 1)
    assert stream.getvalue().endswith("memory: peak 131, plan 140, limit 1,024 MiB\n")


def test_all_lines_count_computed_tokens(tmp_path: Path) -> None:
    stream = io.StringIO()
    with watching(tmp_path, stream, steps=3, report_every=1) as watch:
        watch.record_step({**metrics_record(1), "positions_per_second": 50_000.0})
        watch.record_step({**metrics_record(3), "positions_per_second": 33_400.0})
    first_line, last = stream.getvalue().splitlines()
    assert "  50,000 tokens/s  " in first_line and "  33,400 tokens/s  " in last
    assert "positions" not in first_line and "learnt" not in first_line


def test_a_resumed_run_reports_its_first_step(tmp_path: Path) -> None:
    stream = io.StringIO()
    with watching(tmp_path, stream) as watch:
        watch.resume(13)
        run_steps(watch, 14, 19)
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["14/30"]


def test_losses_and_times_as_text() -> None:
    assert mean_text([1.0, 3.0]) == "2.0000±1.0000"
    assert mean_text([1.0, math.nan]) == "1.0000" and mean_text([math.inf]) == "not finite"
    assert [clock(s) for s in (0.4, 59.6, 83, 3683)] == ["0:00", "1:00", "1:23", "1:01:23"]


# rich keeps the codes of a style that it has once rendered, whatever the terminal could show then
COLOUR = re.compile(r"\x1b\[(38;5;\d+|[39]\d)m")


def on_a_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch, **variables: str) -> str:
    """What a terminal of 100 columns gets from a run of 30 steps."""
    for name, value in ({"TERM": "xterm-256color", "COLUMNS": "100"} | variables).items():
        monkeypatch.setenv(name, value)
    master_fd, slave_fd = pty.openpty()
    chunks = list[bytes]()

    def read() -> None:
        with suppress(OSError):  # the other end is closed
            while part := os.read(master_fd, 1 << 16):
                chunks.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    with (
        open(slave_fd, "w", encoding="utf-8") as stream,
        watching(folder, stream) as watch,  # type: ignore[arg-type]
    ):
        run_steps(watch, 1, 15)
        watch.events.message("said [bold]as it is[/bold]")
        watch.record_step(metrics_record(16, val_loss=3.2))
        run_steps(watch, 17, 30)
    reader.join()
    return b"".join(chunks).decode()


def test_a_terminal_gets_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    output = on_a_terminal(tmp_path, monkeypatch)
    assert "said [bold]as it is[/bold]\r\n" in output
    assert output.count("\n") == 2 and COLOUR.search(output) and output.endswith("\x1b[?25h")
    last_line = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output).splitlines()[-1]
    assert "━" in last_line and " 30/30  loss 3.0" in last_line and "val 3.2000" in last_line
    assert "val 3.2000 (step 16)" in last_line


@pytest.mark.parametrize(
    ("columns", "last"),
    [
        ("110", "memory: peak 131, plan 140 MiB"),
        ("70", r"eta \d:\d\d"),
        ("40", r"loss [\d.]+±[\d.]+"),
    ],
)
def test_a_narrow_terminal_gets_whole_parts(
    columns: str, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = on_a_terminal(tmp_path, monkeypatch, COLUMNS=columns, NO_COLOR="1")
    last_line = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output).splitlines()[-1]
    assert re.search(rf"━ +30/30  .*{last} *$", last_line) and "…" not in output
    assert len(last_line) <= int(columns)


def test_no_color_and_dumb_terminals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not COLOUR.search(on_a_terminal(tmp_path, monkeypatch, NO_COLOR="1"))
    dumb = on_a_terminal(tmp_path, monkeypatch, TERM="dumb")
    assert "\x1b" not in dumb and [line.split()[1] for line in dumb.splitlines()] == [
        "1/30", "10/30", "[bold]as", "20/30", "30/30",
    ]  # fmt: skip


def test_a_step_costs_next_to_nothing(tmp_path: Path) -> None:
    with watching(tmp_path, steps=1000) as watch:
        run_steps(watch, 1, 1)
        start_time = time.thread_time()
        run_steps(watch, 2, 1000)
        assert (time.thread_time() - start_time) / 999 < 0.0002


def test_losses_accuracy_and_their_errors_fit_80_columns() -> None:
    """What a terminal of 80 columns shows of a run, with the bar, and the line of an epoch of `fit`."""
    of = {
        "val_loss": 4.6393,
        "val_error": 0.0123,
        "val_accuracy": 0.241,
        "val_accuracy_error": 0.003,
    }
    assert validation_text(of) == "val 4.6393±0.0123 acc 24.1±0.3%"
    parts = ["1234/5000", f"loss {mean_text([3.1, 3.2])}", validation_text(of), "eta 12:34"]
    assert fit_parts(parts, 80 - MIN_BAR_COLUMNS) == "  ".join(parts)
    results = [Result(), Result()]
    for result in results:
        result.add(5_000, 0.0712, 4_890, None), result.add(5_000, 0.0716, 4_900, None)
    summary = str(Epoch(30, *results, 12.34))
    part = "0.0714±0.0002 acc 97.9±0.1%"
    assert (
        summary == f"epoch 30: loss {part}, val {part.replace(' acc', '')}, 12.3 s"
        and len(summary) <= 80
    )
