"""Speculative decoding: the text is what it would be alone, whatever is guessed; wrong vocabularies."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from packtrain.common.errors import InputError
from packtrain.common.events import Events
from packtrain.engine.executor import Session
from packtrain.inference.generator import Drafter, GenerationLimits, Generator, Reply
from packtrain.inference.kv_cache import CacheLayout, Context, RunSizes, place_runs
from packtrain.inference.sampling import Sampling
from packtrain.inference.speculative import ModelDrafter, NgramDrafter
from packtrain.models.model_file import check_vocabularies
from packtrain.workflows.text_generation import GenerateSettings, generate
from tests.architectures import random_model
from tests.models import CONFIG, seeded_weights
from tests.test_generate import PROMPT, tokenizer

TOKENIZER_CONFIG = replace(CONFIG, vocab_size=len(tokenizer().tokens))


def generator(
    seed: int = 0, cells: int = 64, rows: int = 9, num_extra_tokens: int = 0
) -> Generator:
    """more: tokens that the tokenizer does not have."""
    config = replace(TOKENIZER_CONFIG, vocab_size=TOKENIZER_CONFIG.vocab_size + num_extra_tokens)
    session, cache, sizes = Session(), CacheLayout(cells), RunSizes.of(cells, rows)
    runs = session.executors(place_runs(config, cache, sizes))
    session.set(seeded_weights(config, seed))
    return Generator(Context.within(config, cache, sizes, runs))


def reply(
    sampling: Sampling, drafter: Drafter | None = None, count: int = 40, **options: int
) -> Reply:
    output = Reply(
        generator(**options), tokenizer(), PROMPT, sampling, 7, GenerationLimits(count), drafter, 8
    )
    "".join(output)
    return output


def test_tokens_that_only_one_model_has_are_not_guessed():
    """The larger vocabulary may be either's."""
    flat_sampling = Sampling(temp=1.5, top_k=0, top_p=1, min_p=0)
    undrafted = reply(flat_sampling)
    large_drafter = ModelDrafter(
        generator(1, num_extra_tokens=90), 0.0, TOKENIZER_CONFIG.vocab_size
    )
    proposed = [
        large_drafter.propose([*PROMPT, token], 8) for token in range(TOKENIZER_CONFIG.vocab_size)
    ]
    assert any(len(guess) < 8 for guess in proposed)
    assert max(map(max, filter(None, proposed))) < TOKENIZER_CONFIG.vocab_size
    assert reply(flat_sampling, large_drafter).ids == undrafted.ids
    assert ModelDrafter(generator(1), 0.0, 9).propose([8, 9], 8) == []


class RandomDrafter:
    """Guesses at random, sometimes rightly."""

    def __init__(self, right: Sequence[int]) -> None:
        self.right, self.draw = [*PROMPT, *right], np.random.default_rng(0)

    def propose(self, text: Sequence[int], count: int) -> list[int]:
        correct_tokens = self.right[len(text) : len(text) + count]
        wrong = self.draw.random(len(correct_tokens)) < 0.2
        return [
            (t + w) % TOKENIZER_CONFIG.vocab_size
            for t, w in zip(correct_tokens, wrong, strict=True)
        ]


@pytest.mark.parametrize(
    "sampling", [Sampling(temp=0), Sampling(temp=1.5, top_k=0, top_p=1, min_p=0)]
)
def test_guesses_do_not_change_the_text(sampling: Sampling):
    undrafted = reply(sampling)
    drafters = (
        RandomDrafter(undrafted.ids),
        NgramDrafter(),
        ModelDrafter(generator(0), 0.0, TOKENIZER_CONFIG.vocab_size),
        ModelDrafter(generator(1), 0.0, TOKENIZER_CONFIG.vocab_size),
    )
    for drafter in drafters:
        guessed = reply(sampling, drafter)
        assert (
            guessed.ids == undrafted.ids and guessed.end_reason == undrafted.end_reason == "count"
        )
        assert 0 <= guessed.accepted <= guessed.drafted
        assert guessed.writing.tokens == undrafted.writing.tokens
    assert reply(sampling, RandomDrafter(undrafted.ids)).accepted > 10


def test_a_model_guesses_itself():
    greedy = Sampling(temp=0)
    undrafted, guessed = (
        reply(greedy),
        reply(greedy, ModelDrafter(generator(), 0.0, TOKENIZER_CONFIG.vocab_size)),
    )
    assert guessed.ids == undrafted.ids and guessed.accepted == guessed.drafted > 30
    strict_result = reply(greedy, ModelDrafter(generator(), 1.1, TOKENIZER_CONFIG.vocab_size))
    assert strict_result.ids == undrafted.ids and strict_result.drafted == 0


@pytest.mark.parametrize("count", [1, 2, 3, 17, 200])
def test_guesses_respect_the_number_of_tokens_and_the_context(count: int):
    undrafted = reply(Sampling(temp=0), count=count, cells=40)
    guessed = reply(Sampling(temp=0), RandomDrafter(undrafted.ids), count=count, cells=40)
    assert guessed.ids == undrafted.ids and guessed.end_reason == undrafted.end_reason
    assert undrafted.end_reason == ("context" if count == 200 else "count")


def test_what_followed_before_is_looked_up():
    lookup = NgramDrafter()
    assert lookup.propose([1, 2, 3], 4) == []
    assert lookup.propose([1, 2, 3, 9, 1, 2], 4) == [3, 9, 1, 2]
    assert lookup.propose([1, 2, 3, 9, 1, 2, 3, 7, 8, 2, 3], 2) == [7, 8]
    assert lookup.propose([5, 6, 5, 6], 1) == [5]  # another text


def test_other_vocabularies_are_refused():
    def model(name: str, *tokens: str) -> Any:
        metadata = {"tokenizer.ggml.tokens": list(tokens)}
        return SimpleNamespace(gguf=SimpleNamespace(path=name, metadata=metadata))

    ours = model("a.gguf", "x", "y", "z")
    for compatible_vocab in (("x", "y", "z"), ("x", "y"), ("x", "y", "z", *128 * "w")):
        check_vocabularies(ours, model("b.gguf", *compatible_vocab))
    with pytest.raises(
        InputError, match=r"b.gguf: token 1 is 'odd', and in a.gguf 'y'; a draft needs the same"
    ):
        check_vocabularies(ours, model("b.gguf", "x", "odd", "z"))
    with pytest.raises(
        InputError, match=r"b.gguf: its vocabulary has 132 tokens and that of a.gguf 3; a draft"
    ):
        check_vocabularies(ours, model("b.gguf", "x", "y", "z", *129 * "w"))


def test_the_commands_guess(tmp_path: Path):
    random_model(tmp_path / "a.gguf", "llama")
    options = {"prompt": "the", "n_predict": 30, "temp": 0.0, "ctx": 64}
    undrafted = generate(GenerateSettings(tmp_path / "a.gguf", **options), Events())
    lookup_result = generate(
        GenerateSettings(tmp_path / "a.gguf", **options, draft_lookup=True), Events()
    )
    drafted_task = GenerateSettings(
        tmp_path / "a.gguf", **options, model_draft=tmp_path / "a.gguf", draft_p_min=0.0
    )
    guessed = generate(drafted_task, Events())
    assert (
        undrafted.text == lookup_result.text == guessed.text
        and guessed.drafted == guessed.accepted > 20
    )
    with pytest.raises(InputError, match="--draft-lookup and --model-draft both guess"):
        generate(replace(drafted_task, draft_lookup=True), Events())
