"""The code in README and docs, and the examples, run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(page.name, code, id=f"{page.name}: {code.splitlines()[0]}")
    for page in PAGES
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
]
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.mark.parametrize(("page", "code"), BLOCKS)
def test_code_of_a_page(page, code):
    exec(compile(code, page, "exec"), {})


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    broken = [to for to in LINK.findall(page.read_text()) if not (page.parent / to).exists()]
    assert not broken


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name
)
def test_example(path):
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout
