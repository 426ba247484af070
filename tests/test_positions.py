"""Learned positions: what lies beyond them is refused, in a context and in commands, and none can be moved."""

from pathlib import Path

import numpy as np
import pytest

from packtrain.cli import main
from packtrain.context import Context, ContextError
from packtrain.models.file import open_model
from tests.architectures import CONFIGS, random_model
from tests.kill import chats

LEARNED = CONFIGS["gpt2"].context_length


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt2") / "gpt2.gguf"
    random_model(path, "gpt2")
    return path


def test_a_context_reads_as_many_tokens_as_there_are_positions(gpt2: Path) -> None:
    context = Context(gpt2, cells=2 * LEARNED, sequences=2)
    first = context.decode([5] * LEARNED)
    for tokens in ([5], [5, 5]):
        with pytest.raises(
            ContextError, match=f"has learned {LEARNED} positions; there are no more"
        ):
            context.decode(tokens)
    assert context.next(0) == LEARNED
    np.testing.assert_allclose(context.decode([5] * LEARNED, 1), first, atol=1e-5)


def test_positions_do_not_change(gpt2: Path) -> None:
    context = Context(gpt2, cells=40)
    context.decode([*range(3, 23)])
    for change in (lambda: context.shift(0, -3, 10), lambda: context.divide(0, 2)):
        with pytest.raises(ContextError, match="learned positions are in keys and values already"):
            change()
    assert context.tokens(0) == [*range(3, 23)]


def test_commands_refuse_longer_contexts(
    gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chats.jsonl").write_text(chats())
    data = ["--data", str(tmp_path / "chats.jsonl"), "--chat-template", "chatml"]
    for command in (
        ["generate", str(gpt2), "-p", "the", "-n", "3"],
        ["embed", str(gpt2), "-p", "the"],
        ["eval", str(gpt2), *data],
        ["finetune", str(gpt2), *data, "-o", str(tmp_path / "m.gguf")],
    ):
        assert main([*command, "-c", str(LEARNED + 1)]) == 2, command[0]
        assert f"has learned its positions, and this one only {LEARNED}" in capsys.readouterr().err


def test_a_file_has_positions_instead_of_rope(gpt2: Path) -> None:
    model = open_model(gpt2)
    assert model.gguf.entries["position_embd.weight"].shape == (LEARNED, 256)
    assert not any(key.startswith("gpt2.rope") for key in model.gguf.metadata)
