"""The code in README and docs, and the examples, run as they stand."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import packtrain as pt
from tests.conftest import SHARED

ROOT = Path(__file__).parent.parent


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(page.name, code, id=f"{page.name}: {code.splitlines()[0]}")
    for page in PAGES
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the code of the pages finds base.gguf and chats.jsonl."""
    folder = tmp_path_factory.mktemp("pages")
    chats = [{"prompt": f"What is {i} + 1?", "completion": f"It is {i + 1}."} for i in range(60)]
    lines = [json.dumps(chat) for chat in chats]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    (folder / "text.txt").write_text("\n".join(lines * 3))
    sizes = {"dim": 32, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 32, "vocab_size": 300}
    pt.train(folder / "text.txt", output=folder / "base.gguf", iters=2, ctx=64, **sizes)
    return folder


@pytest.mark.parametrize(("page", "code"), BLOCKS)
def test_code_of_a_page(page, code, folder, monkeypatch):
    monkeypatch.chdir(folder)
    exec(compile(code, page, "exec"), {})


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name
)
def test_example(path):
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout
    for peak, planned in re.findall(r"peak (\d+) of (\d+) MiB planned", done.stdout):
        assert int(peak) <= int(planned)


@pytest.mark.shared
@pytest.mark.parametrize(("net", "min_accuracy"), [("fc", 92.0), ("conv", 70.0)])
def test_handwritten_digits(net, min_accuracy, tmp_path):
    data = SHARED / "mnist"
    options = [
        data,
        "--net",
        net,
        "--epochs",
        "2" if net == "fc" else "1",
        "-o",
        tmp_path / "m.gguf",
    ]
    command = [sys.executable, ROOT / "examples/mnist.py", *options]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    accuracy = re.search(r"test: loss .*acc ([\d.]+)", done.stdout)
    assert accuracy and float(accuracy[1]) > min_accuracy
    peak, planned = map(int, re.search(r"peak (\d+) of (\d+) MiB", done.stdout).groups())
    assert peak <= planned
