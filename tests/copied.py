"""A copy of the package to which something is added, as a contributor would, and what runs there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import packtrain
from packtrain import kernels
from packtrain.kernels.runtime import kernel_cache

SOURCE = Path(packtrain.__file__).parent
NO_CACHE = shutil.ignore_patterns("__pycache__")


def copy_package(folder: Path) -> Path:
    """The package in a copy, in `folder`."""
    return shutil.copytree(SOURCE, folder / "packtrain", ignore=NO_CACHE)


def edit_file(file: Path, *changes: tuple[str, str]) -> None:
    """Put new text in place of old, each of which is there once."""
    text = file.read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{file.name}: {old!r}"
        text = text.replace(old, new)
    file.write_text(text)


def own_cache(folder: Path) -> dict[str, str]:
    """A cache where the copy compiles what is new; what is compiled already is read where it is."""
    kernels.prepare(kernel_cache.kernel_modules())
    cache = folder / "cache/packtrain/kernels"
    cache.mkdir(parents=True)
    for name in kernel_cache.kernel_modules():
        (cache / kernel_cache.folder_name(name)).symlink_to(kernel_cache.module_folder(name))
    return {"XDG_CACHE_HOME": str(folder / "cache")}


def python_in(
    folder: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Python with the copy in this folder, and this environment beside the test's own."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), **environment},
        capture_output=True,
        text=True,
    )


def packtrain_in(
    folder: Path, command: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return python_in(folder, "-m", "packtrain", *command.split(), **environment)


def link_tests(folder: Path) -> None:
    """Let the tests be there, too, and test the copy."""
    (folder / "tests").mkdir()
    for file in SOURCE.parent.glob("tests/*.*"):
        (folder / "tests" / file.name).symlink_to(file)
    (folder / "pyproject.toml").symlink_to(SOURCE.parent / "pyproject.toml")
