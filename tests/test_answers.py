"""Several answers to one prompt: each is what its seed gives alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from packtrain.common.errors import InputError
from packtrain.common.events import Events
from packtrain.engine.executor import Session
from packtrain.inference.generator import Generator, Limits, Reply
from packtrain.inference.kv_cache import Cache, Context, Sizes, placements
from packtrain.inference.parallel_answers import Answers
from packtrain.inference.sampling import Sampling
from packtrain.workflows.text_generation import Generate, generate
from tests.architectures import random_model
from tests.models import values
from tests.test_drafting import KNOWN
from tests.test_generate import PROMPT, tokenizer

SEEDS, WIDE = (7, 8, 9), Sampling(temp=1.5, top_k=0, top_p=1, min_p=0)


def context(cells: int) -> Context:
    session, cache, sizes = Session(), Cache(cells, sequences=3), Sizes.of(cells, 3)
    runs = session.executors(placements(KNOWN, cache, sizes))
    session.set(values(KNOWN))
    return Context.within(KNOWN, cache, sizes, runs, 3)


def alone(seed: int, limits: Limits, cells: int) -> tuple[list[int], str, str]:
    reply = Reply(Generator(context(cells)), tokenizer(), PROMPT, WIDE, seed, limits)
    text = "".join(reply)
    return reply.ids, text, reply.ended


@pytest.mark.parametrize("stops", [(), ("e",)])
def test_each_answer_is_what_its_seed_gives_alone(stops: tuple[str, ...]):
    limits, cells = Limits(20, stops), 90
    answers = Answers(context(cells), tokenizer(), PROMPT, WIDE, SEEDS, limits)
    pieces = [*answers]
    for number, (seed, answer) in enumerate(zip(SEEDS, answers.every, strict=True)):
        ids, text, end_reason = alone(seed, limits, cells)
        assert (answer.ids, answer.text, answer.ended) == (ids, text, end_reason)
        assert "".join(piece for n, piece in pieces if n == number) == text
    assert [n for n, _ in pieces] == sorted(n for n, _ in pieces)
    assert len({tuple(answer.ids) for answer in answers.every}) == 3
    assert answers.reading.tokens == len(PROMPT)


def test_the_prompt_is_read_once_and_shared():
    ctx = context(90)
    answers = Answers(ctx, tokenizer(), PROMPT, WIDE, SEEDS, Limits(1))
    assert [*answers]
    assert np.count_nonzero(ctx.pools.all.sets) == len(PROMPT)


def test_a_full_context_ends_all():
    answers = Answers(context(16), tokenizer(), PROMPT, WIDE, SEEDS, Limits())
    assert [*answers]
    assert {answer.ended for answer in answers.every} <= {"context", "end"}
    assert sum(len(answer.ids) for answer in answers.every) >= 16 - len(PROMPT)


def test_no_tokens_and_texts_as_long_as_the_context():
    none = Answers(context(64), tokenizer(), PROMPT, WIDE, SEEDS, Limits(0))
    assert not "".join(text for _, text in none) and not any(answer.ids for answer in none.every)
    assert {answer.ended for answer in none.every} == {"count"}
    full = Answers(context(200), tokenizer(), PROMPT, WIDE, SEEDS, Limits(), size=20)
    assert [*full]
    for answer in full.every:
        assert answer.ended == "end" or (
            len(PROMPT) + len(answer.ids) == 21 and answer.ended == "context"
        )


def test_each_answer_may_be_as_long_as_the_context_of_the_model(tmp_path: Path):
    config = random_model(tmp_path / "a.gguf", "llama")
    options = {"logit_bias": ("2-inf",), "seed": 1}
    settings = Generate(tmp_path / "a.gguf", prompt="the", n_predict=10**6, parallel=3, **options)
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
    settings = Generate(
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
