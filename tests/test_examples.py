"""The README's code and the examples run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: code.splitlines()[0])
def test_readme(code):
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name
)
def test_example(path):
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout
