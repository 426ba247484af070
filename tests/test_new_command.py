"""A command is added by one module and its name in a list: parsed, helped, refused and documented as all others."""

import json
from pathlib import Path

import pytest

from tests.copied import copy_package, edit_file, link_tests, packtrain_in, python_in

MODULE = '''"""packtrain count: count the letters of a text."""

from dataclasses import dataclass
from pathlib import Path

from packtrain.common.errors import InputError
from packtrain.common.options import option, positional


@dataclass(frozen=True)
class Count:
    text: Path = positional("a text file")
    least: int = option(1, "say nothing of letters that are there less often", min_value=1)


def run(settings: Count) -> int:
    if not settings.text.exists():
        raise InputError(f"{settings.text} is not there")
    text = settings.text.read_text()
    counts = {letter: text.count(letter) for letter in sorted({*text})}
    print({letter: n for letter, n in counts.items() if n >= settings.least})
    return 0
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    home = copy_package(folder)
    (home / "cli/count.py").write_text(MODULE)
    edit_file(
        home / "cli/main.py",
        ('    "compile": (', '    "count": ("count", "Count"),\n    "compile": ('),
    )
    link_tests(folder)
    (folder / "text.txt").write_text("abba c")
    (folder / "given.yaml").write_text("least: 2\n")
    return folder


def test_it_runs_with_flags_and_with_a_file_of_settings(folder: Path) -> None:
    for flags in ("--least 2", "--config given.yaml"):
        result = packtrain_in(folder, f"count text.txt {flags}")
        assert (result.returncode, result.stdout, result.stderr) == (0, "{'a': 2, 'b': 2}\n", "")


def test_its_help_is_what_its_module_says(folder: Path) -> None:
    assert "count the letters of a text." in packtrain_in(folder, "--help").stdout
    said = packtrain_in(folder, "count --help").stdout
    assert said.startswith("usage: packtrain count [options] TEXT\n")
    assert "--least N" in said and "less often (default: 1)" in " ".join(said.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("text.txt --least 0", "--least is 0; it must be 1 or more"),
        ("text.txt --lest 2", "there is no option --lest; did you mean --least?"),
        ("nothing.txt", "nothing.txt is not there"),
        ("", "the following arguments are required: TEXT"),
    ],
)
def test_what_is_wrong_is_one_line(folder: Path, arguments: str, said: str) -> None:
    ran = packtrain_in(folder, f"count {arguments}")
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1
    assert ran.stderr.startswith(f"packtrain: error: {said}")


def test_a_name_that_is_nearly_its_own_is_told(folder: Path) -> None:
    assert "there is no command cuont; did you mean count?" in packtrain_in(folder, "cuont").stderr


def test_it_is_in_the_reference(folder: Path) -> None:
    program = "from tests.reference import page\nimport json\nprint(json.dumps(page()))"
    done = python_in(folder, "-c", program)
    assert done.returncode == 0, done.stderr
    assert "## packtrain count\ncount the letters of a text.\n" in json.loads(done.stdout)
