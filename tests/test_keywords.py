"""Errors of the Python API name keywords: each public function is called with wrong values of each of its keywords."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packtrain as pt
from packtrain.cli.main import COMMANDS, main, settings_class_of
from packtrain.common.errors import SHELL_OR_FLAG, InputError, with_keywords
from packtrain.common.options import option_fields
from packtrain.gguf import MetadataValue
from tests.test_model_file import CONFIG, save

ROOT = Path(pt.__file__).parent
TEMPLATE = "{% for m in messages %}{{ m.role[0] }} {{ m.content }}\n{% endfor %}a "
FLAG = re.compile(
    r"(?<![\w-])--?[a-z][a-z-]*|(?<!\S)/(?:clear|regen|exit|help)"
)  # or a command of the chat
WRONG = object(), "nonsense", "", -7, 1e300, float("nan"), ["nonsense"], {"a": 1}
SMALL = {"dim": 32, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 32, "ctx": 32, "vocab_size": 300}
CALLBACKS = {field.name for field in fields(pt.api.TaskCallbacks) if field.init}  # type: ignore[attr-defined]
ALIASES = re.compile(r"(?:--?[a-z-]+ ?)+")  # of flags
OF_OTHERS = {"include", "local-dir", "no"}  # of hf download, and the beginning of a negated flag


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong value may be a name of a file."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("keywords")
    template = {"tokenizer.chat_template": MetadataValue("string", TEMPLATE)}
    save(folder / "base.gguf", replace(CONFIG, context_length=64), extra=template)
    (folder / "chats.jsonl").write_text('{"prompt": "a b", "completion": "b a"}\n' * 40)
    output_path = folder / "out.gguf"
    model, data = folder / "base.gguf", folder / "chats.jsonl"
    (folder / "notes.txt").write_text("the cat sees the dog.\n" * 400)
    tuning = {"model": model, "data": data, "output": output_path}
    return {
        "train": {"data": folder / "notes.txt", "output": output_path, **SMALL},
        "finetune": tuning,
        "evaluate": {"model": model, "data": data},
        "compare": {"model": [model, model], "data": data},
        "choose": tuning | {"tuned": folder / "none.gguf"},
        "generate": {"model": model, "prompt": "a", "n_predict": 1},
        "chat": {"model": model},
        "embed": {"model": model, "texts": ["a"]},
        "quantize": {"model": model, "output": output_path, "type": "Q8_0"},
        "merge": {"model": model, "adapters": folder / "none.gguf", "output": output_path},
    }


def call_command(name: str, arguments: dict[str, Any]) -> Any:
    """Of training the plan: what is wrong shows there."""
    if name in ("train", "finetune"):
        task = getattr(pt, name)
        positional = [arguments.pop(key) for key in ("model", "data") if key in arguments]
        return pt.plan(task, *positional, **arguments)
    return getattr(pt, name)(**arguments)


def check_message(function: Callable[[], Any], label: str) -> str:
    """Call it; what it raises names no flag, unless in a shell command."""
    try:
        function()
    except Exception as error:
        text = str(error)
        assert not FLAG.search(re.sub(r"`[^`]*`|packtrain [a-z]+ .*", "", text)), f"{label}: {text}"
        return text
    return ""


NAMES = [
    "train",
    "finetune",
    "evaluate",
    "compare",
    "choose",
    "generate",
    "chat",
    "embed",
    "quantize",
]


@pytest.mark.parametrize("name", [*NAMES, "merge"])
def test_commands_name_the_keyword_of_a_wrong_value(name: str, files: dict[str, Any]) -> None:
    tried = 0
    for keyword in inspect.signature(getattr(pt, name)).parameters:
        if keyword in CALLBACKS | {"settings"}:
            continue
        texts = []
        for value in WRONG:
            arguments = files[name] | {keyword: value}
            texts.append(
                check_message(
                    lambda arguments=arguments: call_command(name, {**arguments}),
                    f"{name} {keyword}",
                )
            )  # type: ignore[misc]
        assert any(keyword in text for text in texts), (keyword, texts)
        tried += 1
    assert tried >= 5


def engine_functions() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """Functions and classes that are no commands, each with what it needs."""

    def net(rows: int) -> Any:
        product = pt.matmul(pt.input("x", (rows, 2)), pt.weight("w", (1, 2)))
        return pt.Model.mean_squared_error(product, pt.input("y", (rows, 1)))

    data = {"x": np.ones((8, 2), np.float32), "y": np.ones((8, 1), np.float32)}
    trainer = {"model": net, "optimizer": pt.SGD(lr=0.1), "batch": 4}
    yield "fit", pt.fit, {"model": net, "data": data, "batch": 4, "epochs": 1}
    yield "Trainer", pt.Trainer, trainer
    yield "Trainer", pt.fit, {"model": net, "data": data, "batch": 4, "epochs": 1}
    yield "epoch", pt.epoch, {"trainer": pt.Trainer(**trainer), "data": pt.Dataset(data)}
    for kind in (pt.SGD, pt.AdamW, pt.Muon, pt.LBFGS):
        yield kind.__name__, lambda kind=kind, **settings: kind(**settings).check(), {}  # type: ignore[misc]
    yield "Sampling", pt.Sampling, {}
    yield "Chain", lambda **settings: pt.Chain(pt.Sampling(**settings)), {}
    yield "Sampling", lambda **settings: pt.Sampling(**settings).check_sampling(9), {}
    yield "Dataset", pt.Dataset, {}


def test_the_engine_names_the_keyword_of_a_wrong_value(
    files: dict[str, Any], tmp_path: Path
) -> None:
    base = files["chat"]["model"]
    context = "Context", pt.Context, {"model": base, "cells": 32}
    file = "load", pt.load, {"path": base}
    for name, function, needed in [*engine_functions(), context, file]:
        listed = getattr(pt, name) if name != "Chain" else pt.Sampling
        for keyword in inspect.signature(listed).parameters:
            for value in WRONG:
                arguments = needed | {keyword: value}
                check_message(
                    lambda arguments=arguments, run=function: run(**arguments),
                    f"{name} {keyword}={value!r}",
                )  # type: ignore[misc]


def test_positional_values_and_those_that_are_checked_late(files: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"^model is empty; give a name"):
        pt.generate("")
    with pytest.raises(InputError, match=r"^temp is -1.0; it must be 0 or more"):
        pt.Sampling(temp=-1.0)
    with pytest.raises(InputError, match=r"^logit_bias is 'x'"):
        pt.Sampling(logit_bias=("x",)).check_sampling()
    with pytest.raises(InputError, match=r"^device nonsense: it must be one of"):
        pt.backends.target("nonsense")


def test_a_conversation_that_is_too_long_speaks_of_the_library(
    files: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError) as caught:
        pt.chat(**files["chat"], ctx=8).answer("a b " * 20)
    assert "start a new one, or make room for more (ctx)" in str(caught.value)
    assert "/clear" not in str(caught.value)


def test_the_command_line_keeps_flags(
    files: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, said in (
        (["--logit-bias", "x"], "--logit-bias is 'x'"),
        (["--samplers", "nonsense"], "--samplers: there is no sampler"),
        (["--temp", "-1"], "--temp is -1.0; it must be 0 or more"),
    ):
        assert main(["generate", str(files["chat"]["model"]), "-p", "a", *flags]) == 2
        assert said in capsys.readouterr().err


def sentences() -> Iterator[tuple[Path, str]]:
    """All texts of the package outside the command line and what only developers see."""
    for path in sorted(ROOT.rglob("*.py")):
        part = path.relative_to(ROOT).parts[0]
        if part in ("cli", "devtools", "distributed", "serving"):
            continue
        tree = ast.parse(path.read_text())
        excluded_ids = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                excluded_ids |= {id(part_node) for part_node in ast.walk(node)}
                parts = (
                    str(part_node.value) if isinstance(part_node, ast.Constant) else "X"
                    for part_node in node.values
                )
                yield path.relative_to(ROOT), "".join(parts)
            elif isinstance(node, ast.Constant) and id(node) not in excluded_ids:
                yield path.relative_to(ROOT), str(node.value)


def test_each_flag_in_a_sentence_is_a_keyword() -> None:
    keywords = {
        field.name for name in COMMANDS for field in option_fields(settings_class_of(name))
    } | {"config"}
    wrong = []
    for path, text in sentences():
        for match in SHELL_OR_FLAG.finditer("" if ALIASES.fullmatch(text) else text):
            name = match["name"]
            if name and name.replace("-", "_") not in keywords | OF_OTHERS:
                wrong.append(f"{path}: --{name} in {text!r}")
    assert not wrong, "\n".join(wrong)


def test_shell_commands_stay_as_they_are() -> None:
    for text in (
        "it is on Hugging Face: hf download a/b-GGUF --include '*Q8_0.gguf' --local-dir .",
        "run `packtrain data x --show 3` first",
        "make a GGUF file of it: packtrain convert x --base BASE.gguf -o x.gguf",
    ):
        assert with_keywords(text) == text
    sentence = "run `packtrain compile --jobs 2` first, or give --memory 128MiB"
    assert (
        with_keywords(sentence) == "run `packtrain compile --jobs 2` first, or give memory 128MiB"
    )
