"""Answers that repeat themselves without end are stopped and said; repetitions that people want are not."""

import io
import random
from dataclasses import replace
from pathlib import Path

import pytest

import packtrain as pt
from packtrain.cli import chat, generate
from packtrain.gguf import MetadataValue
from packtrain.inference.generator import LOOP_REPEATS, LOOP_TOKENS, is_loop
from packtrain.workflows.chat_session import ChatSettings
from packtrain.workflows.text_generation import GenerateSettings
from tests.test_chat import TEMPLATE
from tests.test_model_file import CONFIG, save

Capture = pytest.CaptureFixture[str]
LOOP = {"temp": 0.0, "logit_bias": ("40+1000",)}


@pytest.mark.parametrize("period", [1, 2, 7, 30, 100])
def test_a_piece_that_repeats_itself_is_a_loop(period: int) -> None:
    piece = [*range(period)]
    length = max(LOOP_TOKENS, LOOP_REPEATS * period)
    loop = [1000, 1001, *(piece * length)[:length]]
    assert is_loop(loop)
    assert not is_loop(loop[:-1]) and not is_loop([*loop, 2000])


def test_a_loop_that_stumbles_now_and_then_is_a_loop() -> None:
    rng = random.Random(0)
    text = [*range(100, 150)]
    for _ in range(
        60
    ):  # as of a model that answers "Where are my taxes?", and at times begins a new line
        text += [1, 2, 3, 4, 5, 6, *([7] if rng.random() < 0.1 else [])]
    assert any(is_loop(text[:end]) for end in range(len(text) + 1))


def test_what_people_want_repeated_is_no_loop() -> None:
    rng = random.Random(0)
    ha = [5, 6] * (LOOP_TOKENS // 2 - 1)
    numbered = [t for i in range(60) for t in (1, 100 + i, 3, 4, 5)]  # a list whose rows differ
    table = [t for _ in range(40) for t in (7, rng.randrange(50), 7, rng.randrange(50), 7, 8)]
    code = [
        t for i in range(20) for t in (*range(300, 340), 900 + i)
    ]  # the same statement of other names
    poem = [t for i in range(6) for t in (*range(20 * i, 20 * i + 20), *range(900, 950))]
    for text in (ha, numbered, table, code, poem, []):
        assert not any(is_loop(text[:end]) for end in range(len(text) + 1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of random weights; LOOP makes it repeat one token for ever."""
    path = tmp_path_factory.mktemp("loops") / "m.gguf"
    template = {"tokenizer.chat_template": MetadataValue("string", TEMPLATE)}
    save(path, replace(CONFIG, context_length=1024), extra=template)
    return path


def test_generate_stops_a_loop_and_says_so(model: Path, capsys: Capture) -> None:
    settings = GenerateSettings(model, prompt="the", n_predict=400, **LOOP)  # type: ignore[arg-type]
    assert generate.run(settings) == 0
    assert "ended by a loop: the text repeats itself (--no-stop-loops" in capsys.readouterr().err
    looped = pt.generate(model, "the", n_predict=400, **LOOP)
    assert looped.ended == "loop" and LOOP_TOKENS <= len(looped.ids) < 400
    endless = pt.generate(model, "the", n_predict=400, **LOOP, stop_loops=False)
    assert endless.ended == "count" and endless.ids[: len(looped.ids)] == looped.ids
    parallel = pt.generate(model, "the", n_predict=400, **LOOP, parallel=2)
    assert [answer.ended for answer in (parallel, *parallel.others)] == ["loop", "loop"]
    assert parallel.ids == looped.ids


def test_a_conversation_goes_on_after_a_loop_and_a_cut(
    model: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pt.chat(model, **LOOP).answer("a").ended == "loop"
    for max_tokens, said in (
        (-1, "repeats itself; /regen"),
        (9, "cut at 9 tokens; -n sets another"),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
        assert chat.run(ChatSettings(model, n_predict=max_tokens, **LOOP)) == 0  # type: ignore[arg-type]
        assert capsys.readouterr().err.count(said) == 2


def test_chat_bounds_answers_by_default(model: Path) -> None:
    assert 512 <= ChatSettings(model).n_predict <= 1024
