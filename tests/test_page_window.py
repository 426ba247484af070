"""Pages of mapped weights: the schedule keeps to its limit and reads little, and runs with it have the same bits."""

import json
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from benchmarks.watched import run_packtrain
from packtrain.cli.main import main
from packtrain.common.errors import DoesNotFit
from packtrain.common.events import Events
from packtrain.common.mapped_file import MappedFile, limited_pages, mapped_file
from packtrain.common.memory import parse_size, private_nbytes
from packtrain.conversion.calibration import calibration_inputs
from packtrain.conversion.calibration.calibration_inputs import best_reading, reading_plans
from packtrain.conversion.calibration.merge_writer import AdapterMerge
from packtrain.dtypes import DTYPES
from packtrain.engine.backends import target
from packtrain.engine.executor import Stopped
from packtrain.engine.page_window import page_schedule, smallest_window
from packtrain.gguf import GGUF, write_gguf
from packtrain.inference.kv_cache import Context
from packtrain.models.adapter_file import read_adapter
from packtrain.models.model_file import open_model
from packtrain.models.model_with_adapters import read_scaled
from packtrain.planner import resident_limit
from packtrain.workflows.calibration_data import calibration
from packtrain.workflows.imatrix_run import ImatrixSettings
from tests.adapters import random_adapter
from tests.architectures import CONFIGS, random_model
from tests.hostile_requests import Ask
from tests.kill import sample_chats
from tests.servers import serve_process
from tests.test_train import said

PAGE = 4096


def pages_leave() -> bool:
    """Whether pages of files for tests can be given back: not on other systems, nor where files are in memory."""
    with tempfile.NamedTemporaryFile() as written:
        written.write(bytes(16 * PAGE))
        written.flush()
        file = MappedFile(Path(written.name))
        file.release_all()
        return sys.platform == "linux" and file.resident_nbytes() == 0


needs_pages = pytest.mark.skipif(not pages_leave(), reason="pages are the system's alone here")


def read_nbytes(reads, sizes, limit: int, runs: int = 4) -> int:
    """Play runs of a schedule, touching what steps read: at most `limit` stays; return what the last run reads.

    Parts of tables leave before the next step that reads, or go where the schedule has room for rows.
    """
    schedule, loaded_nbytes = page_schedule(reads, sizes, limit), Counter[int]()
    turnovers, resident = schedule.turnovers, {name: sizes[name] for name in schedule.at_start}
    assert sum(resident.values()) <= schedule.peak_nbytes <= limit
    for run in range(runs):
        for i, step in enumerate(reads):
            turnover = turnovers.get(i)
            for name in (*turnover.partly_read, *turnover.dropped) if turnover else ():
                resident.pop(name, None)
            for name in turnover.loaded if turnover else ():
                loaded_nbytes[run] += sizes[name] * (name not in resident)
                resident[name] = sizes[name]
            for name, nbytes in step.items():
                loaded_nbytes[run] += nbytes * (name not in resident)
                resident.setdefault(name, nbytes)
            assert sum(resident.values()) <= limit
            if row_nbytes := schedule.row_nbytes:
                parts = {n for n in resident if resident[n] < sizes[n]}
                assert sum(resident[n] for n in parts) <= row_nbytes
                assert sum(resident[n] for n in resident.keys() - parts) + row_nbytes <= limit
    return loaded_nbytes[runs - 1]


def lru_nbytes(reads, sizes, limit: int, runs: int = 4) -> int:
    """What the last run would read if the least recently used weight left first."""
    resident, loaded_nbytes = dict[str, int](), Counter()
    for run in range(runs):
        for step in reads:
            for name, nbytes in step.items():
                if name not in resident:
                    loaded_nbytes[run] += nbytes
                resident[name] = max(resident.pop(name, 0), nbytes)
            while sum(resident.values()) > limit:
                del resident[next(name for name in resident if name not in step)]
    return loaded_nbytes[runs - 1]


def test_the_worked_example_of_the_page():
    reads = [{name: 1} for name in "abccba"]
    sizes = dict.fromkeys("abc", 1)
    assert read_nbytes(reads, sizes, 2) == 2
    assert read_nbytes(reads, sizes, 3) == 0
    with pytest.raises(DoesNotFit):
        page_schedule([{"a": 1, "b": 1}], dict.fromkeys("ab", 1), 1)


@pytest.mark.parametrize("seed", range(200))
def test_a_schedule_keeps_to_its_limit_and_reads_no_more_than_others_would(seed):
    rng = random.Random(seed)
    names = [f"w{i}" for i in range(rng.randint(1, 12))]
    sizes = {name: rng.randint(1, 20) for name in names}
    forward = [
        rng.sample(names, rng.randint(0, min(2, len(names)))) for _ in range(rng.randint(1, 20))
    ]
    order = forward + forward[::-1] if rng.random() < 0.7 else forward
    reads = [
        {n: sizes[n] if rng.random() < 0.9 else rng.randint(1, sizes[n]) for n in step}
        for step in order
    ]
    for limit in (
        smallest_window(reads),
        rng.randint(smallest_window(reads), sum(sizes.values()) + 1),
    ):
        nbytes = read_nbytes(reads, sizes, limit)
        if all(nbytes == sizes[n] for step in reads for n, nbytes in step.items()):
            assert nbytes <= lru_nbytes(reads, sizes, limit) * 1.2 + max(sizes.values())


# ---- files -----------------------------------------------------------------------------------------------------


@needs_pages
def test_pages_are_given_back_and_asked_for(tmp_path: Path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 4096)
    file = MappedFile(path)
    array = np.ndarray((64, 4096), np.uint8, file, 8 * PAGE)
    assert mapped_file(array[2:]) is file and file.byte_range(array[2:]) == (10 * PAGE, 72 * PAGE)
    assert mapped_file(np.zeros(3)) is None and mapped_file(array.copy()) is None
    file.release_all()
    assert file.resident_nbytes() == 0
    assert array[3, 7] == 7 and file.resident_nbytes() == PAGE
    file.release(*file.byte_range(array[:2]))
    assert file.resident_nbytes() == PAGE
    file.release(12 * PAGE - 1, 12 * PAGE)  # a page that is shared leaves, too
    assert file.resident_nbytes() == 0


@needs_pages
def test_pages_of_tensors_that_are_copied_are_given_back(tmp_path):
    """A thread of its own writes them, and only then may they leave."""
    random_model(tmp_path / "base.gguf", "llama")
    base = GGUF(tmp_path / "base.gguf")
    tensors = {name: base.array(name) for name in base.entries}
    file = mapped_file(tensors["token_embd.weight"])
    file.release_all()
    with limited_pages(1 << 20):
        write_gguf(tmp_path / "copy.gguf", base.values, tensors)
    assert file.resident_nbytes() <= 8 * PAGE
    assert (tmp_path / "copy.gguf").stat().st_size == base.nbytes


# ---- commands --------------------------------------------------------------------------------------------------

FLAGS = [
    *(
        "--iters",
        "3",
        "--batch-size",
        "2",
        "--ctx",
        "64",
        "--lora-rank",
        "4",
        "--replay",
        "0",
        "--val-split",
        "0.2",
    ),
    *("--no-tensorboard", "--merge", "none"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("window")
    (root / "chats.jsonl").write_text(sample_chats())
    random_model(root / "base.gguf", "llama")
    return root


@pytest.fixture
def releases(monkeypatch) -> list[tuple[int, int]]:
    """The ranges that are given back during a test."""
    ranges, release = list[tuple[int, int]](), MappedFile.release

    def recorded(self: MappedFile, start: int, stop: int) -> None:
        ranges.append((start, stop))
        release(self, start, stop)

    monkeypatch.setattr(MappedFile, "release", recorded)
    return ranges


def tuning(folder: Path, output: Path, *flags: str) -> list[str]:
    data = str(folder / "chats.jsonl")
    return [
        "finetune",
        str(folder / "base.gguf"),
        "--data",
        data,
        "-o",
        str(output),
        *FLAGS,
        *flags,
    ]


@pytest.fixture
def smallest_windows(monkeypatch):
    """Windows have room for what one call reads, whatever the limit leaves."""
    window = resident_limit._base_window
    monkeypatch.setattr(
        resident_limit, "_base_window", lambda plans, nbytes, rate: window(plans, 0, rate)
    )


@needs_pages
@pytest.mark.parametrize("flags", [["--resident"], ["--strict", "--memory"]])
def test_a_run_in_a_window_over_its_base_has_the_same_bits(
    folder, tmp_path, releases, smallest_windows, capsys, flags
):
    assert main(tuning(folder, tmp_path / "free.gguf")) == 0
    assert not releases
    limit = f"{(private_nbytes() >> 20) + 340}MiB"  # the tests before this one are in this process
    assert main(tuning(folder, tmp_path / "window.gguf", *flags, limit)) == 0
    plan, text = json.loads((tmp_path / "window.run/plan.json").read_text()), "".join(said(capsys))
    assert "no held-out questions are answered" in text
    assert plan["window_bytes"] < plan["mapped_bytes"] / 2 and len(releases) > 50
    assert re.search(r"of the base, which has .* MiB; a step reads .* MiB from its file", text)
    free, window = (
        read_adapter(tmp_path / f"{name}.gguf").lora_pairs for name in ("free", "window")
    )
    for name, pair in free.items():
        assert all(map(np.array_equal, pair, window[name])), name


@needs_pages
def test_a_window_that_is_too_small_is_refused_with_a_size_that_runs(folder, tmp_path):
    def run_within(size: str) -> subprocess.CompletedProcess[str]:
        command = tuning(folder, tmp_path / "a.gguf", "--resident", size, "--check-answers", "0")
        program = [sys.executable, "-m", "packtrain", *command]
        return subprocess.run(program, capture_output=True, text=True, timeout=300)

    refused = run_within("20MiB")
    assert refused.returncode == 3 and "does not fit into --resident 20.0 MiB" in refused.stderr
    (size,) = re.findall(r"about (\d+MiB) would do", refused.stderr)
    done = run_within(size)
    assert done.returncode == 0, done.stderr
    end = json.loads((tmp_path / "a.run/metrics.jsonl").read_text().splitlines()[-1])
    assert end["peak_bytes"] <= end["planned_bytes"]


@needs_pages
def test_a_command_stays_within_its_limit_from_outside(tmp_path):
    """Private memory of all processes and pages of the base, from the first moment to the merged file."""
    base, data, done = tmp_path / "base.gguf", tmp_path / "chats.jsonl", None
    random_model(base, "llama", feed_forward=16_384)
    data.write_text(sample_chats())
    options = [arg for arg in FLAGS if arg not in ("--merge", "none")]
    for size in ("40MiB", None):
        size = size or re.findall(r"about (\d+MiB) would do", done.said)[0]
        output = ["-o", tmp_path / "tuned.gguf", "--resident", size, "--overwrite"]
        done = run_packtrain("finetune", base, "--data", data, *options, *output, mapped=base)
    assert done.code == 0, done.said
    assert done.resident <= parse_size(size, "size") < done.peak + base.stat().st_size * 0.7


PAGES_STAY = """
import re, sys
from contextlib import redirect_stderr
from io import StringIO
from packtrain.cli.main import main
from packtrain.common.mapped_file import MappedFile
from packtrain.engine import page_window

MappedFile.release = lambda self, start, stop: None
command = ["generate", sys.argv[1], "-p", "the", "-n", "2", "-c", "64"]
assert main(command) == 0  # loads the kernels, whose memory the size below would lack
with redirect_stderr(StringIO()) as errors:
    assert main([*command, "--resident", "20MiB"]) == 3
(size,) = re.findall(r"--resident 20MiB: ([0-9]+)MiB would do", errors.getvalue())
page_window.in_pages = lambda nbytes: nbytes
sys.exit(main([*command, "--resident", f"{size}MiB"]))
"""


@needs_pages
def test_a_file_whose_pages_stay_is_refused(deep):
    """Another program may use them, or they are on a file system in memory. In a process of its own: the heap of this
    one has grown by other tests. The file is larger than a window and all by which processes differ."""
    base = deep / "base.gguf"
    MappedFile(base).prefetch(0, base.stat().st_size)
    assert np.fromfile(base, np.uint8).any()
    command = [sys.executable, "-c", PAGES_STAY, str(base)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 3, refused.stderr
    assert "keeps its pages; --resident cannot limit them" in refused.stderr


@needs_pages
def test_a_run_that_stops_early_leaves_a_known_memory(tmp_path):
    """The next run releases what the schedule does not begin with, as it cannot know how far the last one came."""
    random_model(tmp_path / "base.gguf", "llama")
    model = open_model(tmp_path / "base.gguf")
    sizes = [entry.nbytes for entry in model.gguf.entries.values()]
    with limited_pages(2 * max(sizes)):
        context = Context(model, cells=64)
    limit = 2 * max(sizes) + 2 * PAGE * len(sizes)
    file = mapped_file(model.stored()["token_embd.weight"])
    for stop_after in (10**9, 3, 9, 20, 10**9):
        calls = iter(range(stop_after))
        with suppress(Stopped):
            context.decode([1, 2, 3], stop=lambda calls=calls: next(calls, None) is None)
        assert file.resident_nbytes() <= limit


@needs_pages
def test_experts_stay_as_long_as_there_is_room_for_them(tmp_path, monkeypatch, releases):
    """One by one they leave, those that were chosen longest ago first; what all tokens need stays."""
    random_model(tmp_path / "base.gguf", "llama experts")
    model = open_model(tmp_path / "base.gguf")
    file, prefetch = mapped_file(model.stored()["token_embd.weight"]), MappedFile.prefetch
    prefetched, counts = list[int](), list[int]()

    def recorded(self: MappedFile, start: int, stop: int) -> None:
        prefetched.append(stop - start)
        prefetch(self, start, stop)

    monkeypatch.setattr(MappedFile, "prefetch", recorded)
    results = list[np.ndarray]()
    for share in (0.5, 0.6, 0.95):
        limit = int(len(file) * share)
        with limited_pages(limit):
            context = Context(model, cells=64)
        for token in (1, 2, 3, 4, 1, 2, 3, 4):
            releases.clear()
            logits = context.decode([token])
            assert file.resident_nbytes() <= limit
        expert_nbytes = model.stored()["blk.0.ffn_up_exps.weight"][0].nbytes
        assert all(stop - start == expert_nbytes for start, stop in releases)
        results.append(logits)
        counts.append(sum(prefetched))
        prefetched.clear()
    assert counts[0] > 1.2 * counts[1] > 1.2 * counts[2] and np.ptp(results, axis=0).max() == 0


@needs_pages
@pytest.mark.parametrize("architecture", ["llama", "llama experts"])
def test_a_text_is_written_in_a_window_over_its_model(tmp_path, releases, capsys, architecture):
    """Of a mixture, only the chosen experts are read."""
    random_model(tmp_path / "base.gguf", architecture)
    command = [
        "generate",
        str(tmp_path / "base.gguf"),
        "-p",
        "the",
        "-n",
        "8",
        "-c",
        "64",
        "--temp",
        "0",
    ]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert main([*command, "--resident", "20MiB"]) == 3
    (size,) = re.findall(r"--resident 20MiB: (\d+MiB) would do", capsys.readouterr().err)
    assert not releases
    assert main([*command, "--resident", size]) == 0
    assert capsys.readouterr().out == text and releases


@needs_pages
def test_a_window_is_no_larger_than_the_base_and_leaves_the_rest_to_the_run(
    folder, tmp_path, capsys
):
    """Or the merge and the check of answers would have no memory."""
    assert main(tuning(folder, tmp_path / "a.gguf", "--resident", "2GiB")) == 0
    plan = json.loads((tmp_path / "a.run/plan.json").read_text())
    assert plan["window_bytes"] < plan["mapped_bytes"] * 1.1
    assert plan["budget_bytes"] == (2 << 30) - plan["window_bytes"]
    assert "no held-out questions are answered" not in "".join(said(capsys))


def test_what_a_limit_of_pages_needs(folder, tmp_path, capsys):
    for flags, sentence in (
        (["--strict"], "--strict has no effect without --memory"),
        (
            ["--resident", "2GiB", "--strict", "--memory", "1GiB"],
            "--resident has no effect with --strict",
        ),
        (
            ["--resident", "2GiB", "--device", "cpu:1"],
            "--resident and --strict need one process on the CPU",
        ),
        (["--resident", "2GiB", "--full"], "whose weights are private memory"),
    ):
        assert main(tuning(folder, tmp_path / "a.gguf", *flags)) == 2
        assert sentence in said(capsys)[-1]


@needs_pages
def test_a_loss_is_measured_in_a_window_over_its_model(tmp_path):
    base, text, sizes, losses = tmp_path / "base.gguf", tmp_path / "text.txt", ["20MiB"], []
    random_model(base, "llama", feed_forward=16_384)
    text.write_text("the sun and the sea and the ice. " * 40)
    command = "eval", base, "--data", text, "-c", "64"
    refused = run_packtrain(*command, "--resident", sizes[0])
    sizes += re.findall(r"--resident 20MiB: (\d+MiB) would do", refused.said)
    for flags in ([], ["--resident", sizes[-1]]):
        done = run_packtrain(*command, *flags, mapped=base)
        assert done.code == 0, done.said
        losses.append(done.out)
    assert losses[0] == losses[1] and "perplexity" in losses[0]
    assert done.resident <= parse_size(sizes[1], "size") < done.peak + base.stat().st_size * 0.7


def test_a_loss_in_a_window_is_that_of_one_model(folder, capsys):
    base, data = str(folder / "base.gguf"), str(folder / "chats.jsonl")
    assert main(["eval", base, data, "--data", data, "--resident", "1GiB"]) == 2
    assert "--resident is for one model; measure one at a time" in "".join(said(capsys))
    assert main(["eval", base, "--data", data, "--cache-type", "f16", "--resident", "1GiB"]) == 2
    assert "--resident has no effect with --cache-type" in "".join(said(capsys))


@needs_pages
def test_a_server_answers_in_a_window_over_its_model(tmp_path):
    base, texts, sizes = tmp_path / "base.gguf", [], []
    random_model(base, "llama", feed_forward=16_384)
    program = [sys.executable, "-m", "packtrain", "serve", str(base), "--port", "0", "-c", "256"]
    refused = subprocess.run([*program, "--resident", "20MiB"], capture_output=True, text=True)
    (size,) = re.findall(r"--resident 20MiB: (\d+MiB) would do", refused.stderr)
    body = json.dumps({"prompt": "the", "n_predict": 8, "temperature": 0}).encode()
    for flags in ([], ["--resident", size]):
        with serve_process(base, "-c", "256", *flags) as server:
            status, _, answer = server.ask(Ask("POST", "/completion", body))
            assert status == 200, answer
            texts.append(json.loads(answer)["content"])
            sizes.append(MappedFile(base).resident_nbytes())
    assert texts[0] == texts[1] and sizes[1] < sizes[0] * 0.7


def test_a_context_of_the_library_names_its_keyword(tmp_path):
    random_model(tmp_path / "base.gguf", "llama")
    with pytest.raises(DoesNotFit, match=r"^resident 20MiB: \d+MiB would do"):
        pt.Context(tmp_path / "base.gguf", cells=64, resident="20MiB")
    with pytest.raises(pt.ContextError, match="resident limits pages of a model on the CPU"):
        pt.Context(tmp_path / "base.gguf", cells=64, resident="1GiB", target=target("cpu:1"))


@needs_pages
def test_a_server_embeds_in_the_window_over_its_model(tmp_path):
    """Both contexts share one limit, and each needs pages that the other one left."""
    base, answers, sizes = tmp_path / "base.gguf", [], []
    random_model(base, "llama", feed_forward=16_384)
    flags = base, "-c", "256", "--embeddings"
    refused = run_packtrain("serve", *flags, "--port", "0", "--resident", "20MiB")
    (size,) = re.findall(r"--resident 20MiB: (\d+MiB) would do", refused.said)
    completion = json.dumps({"prompt": "the", "n_predict": 4, "temperature": 0}).encode()
    requests = (
        ("/v1/embeddings", json.dumps({"input": "the sun"}).encode()),
        ("/completion", completion),
    )
    for limit in ([], ["--resident", size]):
        with serve_process(*flags, *limit) as server:
            for path, body in requests * 2:
                status, _, answer = server.ask(Ask("POST", path, body))
                assert status == 200, answer
                fields = json.loads(answer)
                answers.append(fields.get("content") or fields["data"][0]["embedding"])
                sizes.append(MappedFile(base).resident_nbytes())
    assert answers[:4] == answers[4:] and max(sizes[4:]) < min(sizes[:4]) * 0.7


# ---- files that are written ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> Path:
    """A folder with a model of many blocks, of which a window shows few, an adapter of it, and conversations."""
    folder = tmp_path_factory.mktemp("deep")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(CONFIGS, "deep", replace(CONFIGS["llama"], block_count=16))
        random_model(folder / "base.gguf", "deep")
    random_adapter(folder / "adapter.gguf", open_model(folder / "base.gguf"))
    (folder / "chats.jsonl").write_text(sample_chats())
    return folder


def arguments(folder: Path, command: str) -> list[str | Path]:
    base, output, data = folder / "base.gguf", folder / "out.gguf", folder / "chats.jsonl"
    return {
        "merge": ["merge", base, folder / "adapter.gguf", "-o", output, "--overwrite"],
        "quantize": ["quantize", base, output, "Q4_0", "--pure", "--overwrite"],
        "quantize with data": [
            *("quantize", base, output, "Q4_0", "--pure", "--overwrite", "--calibrate", data),
        ],
        "imatrix": ["imatrix", base, "--data", data, "-o", output, "--overwrite"],
    }[command]


@needs_pages
@pytest.mark.parametrize("command", ["merge", "quantize", "quantize with data", "imatrix"])
def test_a_file_is_written_in_a_window_over_what_is_read_and_written(deep, command):
    """Pages of both, and private memory, from outside; a refusal names a size that runs."""
    command_line, base = arguments(deep, command), deep / "base.gguf"
    # compiles kernels, for which sizes would be larger
    assert run_packtrain(*command_line).code == 0
    whole_bytes = (deep / "out.gguf").read_bytes()
    refused = run_packtrain(*command_line, "--resident", "10MiB")
    assert refused.code == 3
    (size,) = re.findall(r"(\d+MiB)(?: would do)?$", refused.said.strip())
    watched = {"mapped": base, "written": deep / "out.gguf"}
    done = run_packtrain(*command_line, "--resident", size, **watched)
    assert done.code == 0, done.said
    assert done.resident <= parse_size(size, "size") and done.pages < base.stat().st_size * 0.7
    if "data" not in command:  # of which a small limit reads less
        assert whole_bytes == (deep / "out.gguf").read_bytes()


@needs_pages
def test_matrices_are_rounded_with_data_in_a_window_to_the_same_bits(deep, tmp_path, monkeypatch):
    """Rows that pass are given back, also those that were written; those of the window stay until it drops them."""
    monkeypatch.setattr(calibration_inputs, "MAX_TOKENS", 1024)
    base = open_model(deep / "base.gguf")
    adapters = read_scaled([str(deep / "adapter.gguf")], base.gguf)
    merge = AdapterMerge(base, adapters, DTYPES["q4_0"], use_data=True)
    rows = calibration(
        ImatrixSettings(base.gguf.path, deep / "chats.jsonl", Path()), base, Events()
    )
    plan = next(reading_plans(merge.adapted, merge.calibrated, rows.time, rows.windows))
    for name, limit in (("free", None), ("window", plan.window_nbytes)):
        with limited_pages(limit):
            merge.write_file(tmp_path / name, "merged", plan, rows)
    resident = [MappedFile(path).resident_nbytes() for path in (base.gguf.path, tmp_path / name)]
    assert sum(resident) <= plan.window_nbytes < base.gguf.nbytes * 0.6
    sizes = merge.adapted, merge.calibrated, rows.time, rows.windows
    assert best_reading(*sizes, plan.nbytes, page_nbytes=plan.window_nbytes) == plan
    assert best_reading(*sizes, plan.nbytes, page_nbytes=plan.window_nbytes - 1) != plan
    assert (tmp_path / "free").read_bytes() == (tmp_path / "window").read_bytes()
