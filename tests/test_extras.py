"""Without an extra: what needs it says which one to install, and what does not need it does not load it.

Each in a process of its own, in which the packages are absent.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architectures import random_model

EXTRAS = "starlette", "uvicorn", "llguidance", "openai", "playwright", "pyarrow", "torch"
BENEATH = "anyio", "h11", "httpx", "pydantic"  # which these load
ABSENT = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {absent!r} else super().find_spec(name, path, target)

sys.meta_path[:] = [Finder if one is PathFinder else one for one in sys.meta_path]
"""
COMMAND = "from packtrain.cli.main import main\nsys.exit(main(sys.argv[1:]))\n"


def run(code: str, *arguments: object, absent: tuple[str, ...]) -> "subprocess.CompletedProcess[str]":  # fmt: skip
    command = [sys.executable, "-c", ABSENT.format(absent=absent) + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("extras") / "m.gguf"
    random_model(path, "llama")
    return path


GRAMMAR = "generate", "{}", "-p", "a", "--grammar", 'root ::= "a"'
CASES = [
    (("serve", "{}"), ("uvicorn",), "packtrain serve needs uvicorn: pip install uvicorn", "server"),
    (("serve", "{}"), ("starlette",), "packtrain serve needs starlette: pip install starl", "server"),
    (("serve", "{}"), EXTRAS, "needs starlette and uvicorn: pip install starlette uvicorn", "server"),
    (("runs", ".", "--watch", "0"), EXTRAS, "--watch needs starlette and uvicorn: pip ", "server"),
    (GRAMMAR, ("llguidance",), "need llguidance: pip install llguidance", "grammar"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "absent", "words", "extra"), CASES)
def test_what_needs_an_extra_says_which(
    model: Path, arguments: tuple[str, ...], absent: tuple[str, ...], words: str, extra: str
) -> None:
    done = run(
        COMMAND, *(argument.replace("{}", str(model)) for argument in arguments), absent=absent
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    said = done.stderr.splitlines()[-1]
    assert words in said and said.endswith(f"extra {extra})"), said


def test_commands_that_need_none_work_without_all(model: Path) -> None:
    done = run(COMMAND, "generate", model, "-p", "a", "-n", "2", "--seed", "1", absent=EXTRAS)
    assert done.returncode == 0, done.stderr
    assert run(COMMAND, "serve", "--help", absent=EXTRAS).returncode == 0


def test_the_package_loads_no_extra() -> None:
    """Nor does any of its public names."""
    code = (
        "import json, packtrain\nnames = [getattr(packtrain, name) for name in packtrain.__all__]\n"
        "print(json.dumps([len(names), *sorted({name.partition('.')[0] for name in sys.modules})]))"
    )
    done = run(code, absent=())
    count, *loaded = json.loads(done.stdout)
    assert count > 10 and "numpy" in loaded, done.stderr
    assert not {*EXTRAS, *BENEATH} & {*loaded}
