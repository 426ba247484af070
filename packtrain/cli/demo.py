"""packtrain demo: train a small model on Python's own documentation and generate text; nothing is downloaded."""

import ast
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packtrain.cli import generate, print_message, train
from packtrain.common.errors import InputError
from packtrain.common.files import write_text
from packtrain.common.options import option
from packtrain.training.train_settings import TrainSettings
from packtrain.workflows.text_generation import GenerateSettings

TEXT_NBYTES = 3 << 20
SEPARATOR = "<|endoftext|>"
MARKER_FILE = ".packtrain-demo"  # marks a folder that the demo may overwrite


@dataclass(frozen=True)
class DemoSettings:
    folder: Path = option(Path("demo"), "folder for the text, the model and its run", flags="-o")
    iters: int = option(300, "steps to train", min_value=1)


def run(settings: DemoSettings) -> int:
    """Collect text, train preset `1m` on it, and generate text. Raises InputError, OSError."""
    marker_path = settings.folder / MARKER_FILE
    if settings.folder.exists() and not settings.folder.is_dir():
        raise InputError(f"--folder: {settings.folder} is a file; give an empty or a new folder")
    if settings.folder.exists() and any(settings.folder.iterdir()) and not marker_path.exists():
        fact = f"--folder: {settings.folder} has other files; give an empty or a new folder"
        raise InputError(fact)
    settings.folder.mkdir(parents=True, exist_ok=True)
    marker_path.touch()
    text = settings.folder / "python.txt"
    write_text(text, f"\n{SEPARATOR}\n".join(library_documents(TEXT_NBYTES)) + "\n")
    print_message(f"{text}: {text.stat().st_size / 1e6:.1f} MB of this Python's own documentation")
    model_path = settings.folder / "model.gguf"
    train_settings = TrainSettings(
        data=text, output=model_path, iters=settings.iters, batch_size=16, lr=3e-3, steps_per_eval=100, overwrite=True,
    )  # fmt: skip
    exit_code = train.run(train_settings)
    if exit_code == 0:
        print("\nThe model writes:\n", flush=True)
        exit_code = generate.run(
            GenerateSettings(model=model_path, prompt="Return the", n_predict=96, seed=1)
        )
    return exit_code


def library_documents(nbytes: int) -> Iterator[str]:
    """Yield docstrings of the standard library with their names, file by file, about `nbytes` in total."""
    root, num_chars = Path(sysconfig.get_path("stdlib")), 0
    for file in sorted(root.rglob("*.py")):
        parent_names = file.relative_to(root).parts[:-1]
        if {"site-packages", "test", "tests", "idle_test", "__pycache__"} & {*parent_names}:
            continue
        for document in _docstrings(file):
            num_chars += len(document)
            if num_chars > nbytes:
                return
            yield document


def _docstrings(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, SyntaxError):
        return
    documented_nodes = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, documented_nodes) else None
        if text and len(text) > 60:
            name = getattr(node, "name", file.stem)
            yield f"{name}: {text}"
