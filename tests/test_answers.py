"""Several answers to one prompt: each is what its seed gives alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from packtrain.common.errors import InputError
from packtrain.common.events import Events
from packtrain.engine.executor import Session
from packtrain.inference.generator import GenerationLimits, Generator, Reply
from packtrain.inference.kv_cache import CacheLayout, Context, RunSizes, place_runs
from packtrain.inference.parallel_answers import ParallelAnswers
from packtrain.inference.sampling import Sampling
from packtrain.workflows.text_generation import GenerateSettings, generate
from tests.architectures import random_model
from tests.models import seeded_weights
from tests.test_drafting import TOKENIZER_CONFIG
from tests.test_generate import PROMPT, tokenizer

SEEDS, WIDE = (7, 8, 9), Sampling(temp=1.5, top_k=0, top_p=1, min_p=0)


def context(cells: int) -> Context:
    session, cache, sizes = Session(), CacheLayout(cells, max_sequences=3), RunSizes.of(cells, 3)
    runs = session.executors(place_runs(TOKENIZER_CONFIG, cache, sizes))
    session.set(seeded_weights(TOKENIZER_CONFIG))
    return Context.within(TOKENIZER_CONFIG, cache, sizes, runs, 3)


def single_reply(seed: int, limits: GenerationLimits, cells: int) -> tuple[list[int], str, str]:
    reply = Reply(Generator(context(cells)), tokenizer(), PROMPT, WIDE, seed, limits)
    text = "".join(reply)
    return reply.ids, text, reply.end_reason


@pytest.mark.parametrize("stops", [(), ("e",)])
def test_each_answer_is_what_its_seed_gives_alone(stops: tuple[str, ...]):
    limits, cells = GenerationLimits(20, stops), 90
    answers = ParallelAnswers(context(cells), tokenizer(), PROMPT, WIDE, SEEDS, limits)
    pieces = [*answers]
    for number, (seed, answer) in enumerate(zip(SEEDS, answers.answers, strict=True)):
        ids, text, end_reason = single_reply(seed, limits, cells)
        assert (answer.ids, answer.text, answer.end_reason) == (ids, text, end_reason)
        assert "".join(piece for n, piece in pieces if n == number) == text
    assert [n for n, _ in pieces] == sorted(n for n, _ in pieces)
    assert len({tuple(answer.ids) for answer in answers.answers}) == 3
    assert answers.reading.tokens == len(PROMPT)


def test_the_prompt_is_read_once_and_shared():
    ctx = context(90)
    answers = ParallelAnswers(ctx, tokenizer(), PROMPT, WIDE, SEEDS, GenerationLimits(1))
    assert [*answers]
    assert np.count_nonzero(ctx.pools.all.sets) == len(PROMPT)


def test_a_full_context_ends_all():
    answers = ParallelAnswers(context(16), tokenizer(), PROMPT, WIDE, SEEDS, GenerationLimits())
    assert [*answers]
    assert {answer.end_reason for answer in answers.answers} <= {"context", "end"}
    assert sum(len(answer.ids) for answer in answers.answers) >= 16 - len(PROMPT)


def test_no_tokens_and_texts_as_long_as_the_context():
    none = ParallelAnswers(context(64), tokenizer(), PROMPT, WIDE, SEEDS, GenerationLimits(0))
    assert not "".join(text for _, text in none) and not any(answer.ids for answer in none.answers)
    assert {answer.end_reason for answer in none.answers} == {"count"}
    full = ParallelAnswers(
        context(200), tokenizer(), PROMPT, WIDE, SEEDS, GenerationLimits(), size=20
    )
    assert [*full]
    for answer in full.answers:
        assert answer.end_reason == "end" or (
            len(PROMPT) + len(answer.ids) == 21 and answer.end_reason == "context"
        )


def test_each_answer_may_be_as_long_as_the_context_of_the_model(tmp_path: Path):
    config = random_model(tmp_path / "a.gguf", "llama")
    options = {"logit_bias": ("2-inf",), "seed": 1}
    settings = GenerateSettings(
        tmp_path / "a.gguf", prompt="the", n_predict=10**6, parallel=3, **options
    )
    done = generate(settings, Events())
    single = generate(replace(settings, parallel=1), Events())
    for answer in (done, *done.others):
        assert (
            answer.ended == "context"
            and len(answer.ids) == len(single.ids) > config.context_length / 2
        )


def test_the_command_writes_them_one_after_the_other(tmp_path: Path):
    random_model(tmp_path / "a.gguf", "llama")
    pieces = list[str]()
    events = type("Heard", (Events,), {"text": lambda self, piece: pieces.append(piece)})()
    settings = GenerateSettings(
        tmp_path / "a.gguf", prompt="the", n_predict=12, seed=5, temp=1.0, parallel=3
    )
    done = generate(settings, events)
    answers = (done, *done.others)
    single = [generate(replace(settings, parallel=1, seed=5 + n), Events()) for n in range(3)]
    assert [answer.text for answer in answers] == [answer.text for answer in single]
    expected = "\n\n".join(
        f"--- {n}, seed {4 + n} ---\n{answer.text}" for n, answer in enumerate(answers, 1)
    )
    assert "".join(pieces) == expected
    with pytest.raises(InputError, match="--parallel writes tokens of all answers together"):
        generate(replace(settings, draft_lookup=True), Events())
