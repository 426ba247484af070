"""Learned positions: what lies beyond them is refused, in a context and in commands, and none can be moved."""

from pathlib import Path

import numpy as np
import pytest

from packtrain.cli.main import main
from packtrain.inference.kv_cache import Context, ContextError
from packtrain.models.model_file import open_model
from tests.architectures import CONFIGS, random_model
from tests.kill import sample_chats

LEARNED = CONFIGS["gpt2"].context_length
SHORT = CONFIGS["phi3 long"].original_context


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
    (tmp_path / "chats.jsonl").write_text(sample_chats())
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


# ---- Phi's two sets of factors: the context that is given says which -------------------------------------------


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("phi") / "phi.gguf"
    random_model(path, "phi3 long")
    return path


def test_factors_are_those_of_one_sequence_s_context(phi: Path) -> None:
    text = [*range(3, 13)]
    short, long = (
        Context(phi, cells=cells, cache="f32").decode(text) for cells in (SHORT, SHORT + 1)
    )
    assert np.abs(short - long).max() > 1e-3
    for options, expected in (
        ({"parts": True}, short),
        ({"longest": SHORT}, short),
        ({"longest": SHORT + 1}, long),
        ({}, long),
    ):
        got = Context(phi, cells=2 * SHORT, sequences=2, cache="f32", **options).decode(text, 1)
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_several_answers_are_what_one_would_be(
    phi: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["-p", "the", "-n", "8", "-s", "5", "--no-display-prompt"]
    assert main(["generate", str(phi), *flags]) == 0
    single_answer = capsys.readouterr().out.strip()
    assert main(["generate", str(phi), *flags, "--parallel", "3"]) == 0
    assert single_answer in capsys.readouterr().out


def test_a_state_is_for_the_factors_of_its_context(phi: Path) -> None:
    first = Context(phi, cells=SHORT)
    first.decode([*range(3, 13)])
    state = first.save()
    other = Context(phi, cells=2 * SHORT, sequences=2, parts=True)
    other.restore(state, [1])
    assert other.tokens(1) == [*range(3, 13)]
    with pytest.raises(ContextError, match="another kind of rope factors"):
        Context(phi, cells=SHORT + 1).restore(state)


def test_commands_say_which_factors_apply(
    phi: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = f"is more than {SHORT}: positions are rotated by the model's long factors"
    for ctx, said in ((SHORT, False), (SHORT + 1, True)):
        assert main(["generate", str(phi), "-p", "the", "-n", "3", "-c", str(ctx)]) == 0
        assert (f"--ctx {ctx} {note}" in capsys.readouterr().err) == said
    (tmp_path / "notes.txt").write_text("the cat sat on the mat. " * 100)
    for ctx, said in ((SHORT, True), (2 * SHORT, False)):
        output = tmp_path / f"{ctx}.gguf"
        args = ["--data", str(tmp_path / "notes.txt"), "-o", str(output), "--iters", "1"]
        assert main(["finetune", str(phi), *args, "-c", str(ctx)]) == 0
        assert (f"llama-cli -m {output} -c {SHORT} " in capsys.readouterr().err) == said
