"""The library as a notebook uses it: results of one line, tables and pictures, Ctrl-C, data in memory."""

import json
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import packtrain as pt
from packtrain.common.errors import InputError, with_keywords
from packtrain.training.monitoring.notebook import records_path

SMALL = {"dim": 32, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 32, "ctx": 32, "vocab_size": 300}
TEXTS = [f"the {i} cats see {i * 7 % 13} dogs." for i in range(400)]
MOST_REPR, MOST_HTML, MOST_NOTEBOOK = 300, 80_000, 300_000  # characters


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook")
    return pt.train(TEXTS, output=folder / "base.gguf", iters=12, **SMALL)


def test_tab_shows_the_commands():
    code = "import sys, packtrain as pt; print(*dir(pt)); assert not {'numba', 'torch'} & {*sys.modules}"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"train", "finetune", "plan", "evaluate", "chat", "fit"} <= {*names.stdout.split()}
    assert "importlib" not in names.stdout.split()


def results(trained):
    yield trained
    yield trained.plan
    yield trained.plan.plans.largest_plan
    yield pt.evaluate(trained.output, TEXTS[:40])
    yield pt.generate(trained.output, "the", n_predict=4, temp=0.0)


def test_a_result_is_one_line(trained):
    for result in results(trained):
        assert len(repr(result)) <= MOST_REPR and "\n" not in repr(result), type(result)
    assert "12 steps" in repr(trained) and "validation loss" in repr(trained)


def test_tables_and_pictures_are_small(trained):
    for result in (trained, trained.plan, pt.plan(pt.train, TEXTS, preset="110m")):
        shown = result._repr_html_()
        assert "<svg" in shown and "<table" in shown and len(shown) <= MOST_HTML


def test_the_table_of_a_plan_adds_up_to_its_total(trained):
    rows = trained.plan._repr_html_().partition("</table>")[0].split("<tr>")[1:]
    cells = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in rows]
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20}
    sizes = {name: float(size.split()[0]) * units[size.split()[1]] for name, size, _ in cells}
    total = sizes.pop("total")
    assert {"weights", "arena", "process"} <= {*sizes} and total > 2**20
    assert abs(sum(sizes.values()) - total) <= len(sizes) * 0.06 * 2**20  # sizes have one decimal


def test_history_frame_and_plot(trained):
    history = trained.history
    assert [record["step"] for record in history] == [*range(1, 13)]
    assert [r["step"] for r in history if "val_loss" in r] == [5, 10, 12]
    assert "validation loss" in trained.plot().html
    if find_spec("pandas"):
        assert list(trained.to_frame()["loss"]) == trained.losses
    else:
        with pytest.raises(InputError, match="pip install pandas"):
            trained.to_frame()


def test_ctrl_c_saves_and_the_same_call_goes_on(tmp_path, capsys):
    def interrupt(step):
        if step.step == 3:
            signal.raise_signal(signal.SIGINT)

    options = dict(iters=8, seed=4, **SMALL)
    reference = pt.train(TEXTS, output=tmp_path / "whole.gguf", **options)
    output = tmp_path / "a.gguf"
    stopped = pt.train(TEXTS, output=output, on_step=interrupt, **options)
    assert stopped.stopped and stopped.progress.step == 3 and "resume=True" in repr(stopped)
    assert "stopped after step 3 of 8; continue with: the same call" in capsys.readouterr().err
    done = pt.train(TEXTS, output=output, resume=True, **options)
    assert not done.stopped and done.losses == reference.losses


def test_a_run_without_a_checkpoint_says_that_it_begins(tmp_path, capsys):
    pt.train(TEXTS, output=tmp_path / "a.gguf", iters=1, resume=True, **SMALL)
    assert "has no checkpoint yet: starting at step 1" in capsys.readouterr().err


def test_ctrl_c_in_fit_saves(tmp_path):
    import numpy as np

    def net(rows):
        return pt.Model.mean_squared_error(
            pt.matmul(pt.input("x", (rows, 2)), pt.weight("w", (1, 2))), pt.input("y", (rows, 1))
        )

    x = np.ones((40, 2), np.float32)
    data = {"x": x, "y": x.sum(1, keepdims=True)}
    batch_count = [0]

    def interrupt(batch):
        batch_count[0] += 1
        if batch_count[0] == 3:
            signal.raise_signal(signal.SIGINT)

    options = {"epochs": 2, "batch": 10, "folder": tmp_path / "run"}
    done = pt.fit(net, data, callbacks=pt.Callbacks(after=interrupt), **options)
    assert done.stopped and done.trainer.done == 3
    resumed = pt.fit(net, data, resume=True, **options)
    assert not resumed.stopped and resumed.trainer.done == 8 and len(resumed.history) >= 1
    assert "<svg" in resumed._repr_html_() and "\n" not in repr(resumed)


class FakeDataFrame:
    """What of a DataFrame of pandas is used."""

    columns = ("prompt", "completion")

    def to_dict(self, orient):
        assert orient == "records"
        return [
            {"prompt": "Hi?", "completion": "Yes."},
            {"prompt": "Ho?", "completion": float("nan")},
        ]


def test_data_in_memory_becomes_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert records_path("a.csv") == "a.csv"
    path = records_path([{"prompt": "Hi?", "completion": "Yes."}])
    assert path == records_path(({"prompt": "Hi?", "completion": "Yes."},))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"prompt": "Hi?", "completion": "Yes."}
    ]
    frame = records_path(FakeDataFrame()).read_text().splitlines()
    assert json.loads(frame[1]) == {"prompt": "Ho?", "completion": None}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ((text for text in TEXTS), "data is a generator; it must be a path, a list of dicts"),
        ([], "data has no records"),
        ([1], "record 1 is a int; it must be a dict or a text"),
        ([{"a": object()}], "record 1 has a object"),
        ({"x": 1}, "data is a dict"),
        ([__file__.replace("test_notebook.py", "slow.txt")], "record 1 is a file; give one path"),
    ],
)
def test_other_data_is_refused(data, said):
    with pytest.raises(InputError, match=said):
        pt.train(data, **SMALL)


def test_errors_name_keywords(trained, tmp_path):
    with pytest.raises(InputError, match=r"^lora_rank has no effect with full"):
        pt.finetune(trained.output, TEXTS, output=tmp_path / "a.gguf", full=True, lora_rank="8")
    assert with_keywords("give --no-pack or --lora-rank 8") == "give pack=False or lora_rank 8"
    assert with_keywords("data/my--notes.csv: row 3, see --skip-bad") == (
        "data/my--notes.csv: row 3, see skip_bad"
    )
    assert with_keywords("continue with: packtrain train -o 'my model.gguf' --resume") == (
        "continue with: the same call of train and resume=True"
    )


def test_help_lists_every_setting():
    text = pt.finetune.__doc__
    assert "lora_rank: tuple[str, ...] = ('16',)" in text and "pt.finetune(" in text
    assert "--" not in text.split("LoRA:")[1].split("\n\n")[0]


CELLS = (
    "import packtrain as pt; small = dict(dim=32, layers=1, heads=2, kv_heads=2, ffn=32, ctx=32, vocab_size=300)",
    "texts = [f'the {i} cats see {i * 7 % 13} dogs.' for i in range(400)]",
    "pt.plan(pt.train, texts, preset='110m')",
    "done = pt.train(texts, output='base.gguf', iters=30, **small)",
    "done",
    "done.plan",
    "done.plot()",
    "tuned = pt.finetune('base.gguf', texts, output='tuned.gguf', iters=6)\ntuned",
    "tuned.to_frame().tail(3)",
    "pt.evaluate(['base.gguf', 'tuned.gguf'], texts)",
    "pt.generate('tuned.gguf', 'the', n_predict=8)",
    "import os, signal\n"
    "def interrupt(step):\n"
    "    if step.step == 5: os.kill(os.getpid(), signal.SIGINT)\n"
    "half = pt.train(texts, output='half.gguf', iters=20, on_step=interrupt, **small)\nhalf",
    "pt.train(texts, output='half.gguf', iters=20, resume=True, **small).progress.step",
    "pt.finetune('base.gguf', texts, output='other.gguf', lora_rank='0')",
)  # fmt: skip


def executed(notebook, folder, **options):
    """Run a notebook in a folder; its text with all outputs must stay small."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources, **options).execute()
    text = nbformat.writes(notebook)
    (folder / "shown.ipynb").write_text(text)
    assert len(text) <= MOST_NOTEBOOK
    return notebook


def shown_texts(cell):
    return "".join(str(out.get("data", out)) for out in cell.outputs)


EXAMPLE = Path(__file__).parent.parent / "examples/first_run.ipynb"


def test_the_example_notebook_is_kept_without_outputs():
    cells = json.loads(EXAMPLE.read_text())["cells"]
    code_cells = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code_cells) >= 10
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code_cells)


@pytest.mark.notebook
def test_the_example_notebook(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    notebook = executed(nbformat.read(EXAMPLE, as_version=4), tmp_path)
    shown = {cell.source: shown_texts(cell) for cell in notebook.cells if cell.cell_type == "code"}
    expected_parts = {
        "pt.plan(": ("<svg", "<table", "arena"),
        "pt.DoesNotFit": ("does not fit into 40.0 MiB",),
        "base = pt.train": ("<progress", "300/300", "<svg"),
        "run.stop()": ("not yet: the run was stopped", "stopped after step 4"),
        "resume=True": ("80 losses are equal, bit for bit",),
        "tuned = pt.finetune": ("<svg", "held-out question", "The end!"),
        "pt.chat(": ("The end!",),
    }
    for code, parts in expected_parts.items():
        (output,) = (text for source, text in shown.items() if code in source)
        assert all(part in output for part in parts), (code, output)


@pytest.mark.notebook
def test_a_notebook_shows_every_result(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    executed(notebook, tmp_path, allow_errors=True)
    outputs = [cell.outputs for cell in notebook.cells]
    failed = [out for cell in outputs[:-1] for out in cell if out.output_type == "error"]
    assert not failed, failed
    shown = [shown_texts(cell) for cell in notebook.cells]
    assert "<progress" in shown[3] and "30/30" in shown[3]
    for cell in (2, 4, 5, 6, 7):
        assert "<svg" in shown[cell], CELLS[cell]
    assert "stopped after step 5 of 20" in shown[11] and "'20'" in shown[12]
    (error,) = outputs[-1]
    assert error.ename == "InputError" and len("\n".join(error.traceback).splitlines()) <= 10
    assert "lora_rank 0: it must be from 1 to 4096" in error.traceback[-1]
