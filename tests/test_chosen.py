"""Tokens chosen in the graph of a run: those that the host's chain chooses out of all logits, for any chain."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain.common.errors import InputError
from packtrain.common.events import Events
from packtrain.engine.executor import Session
from packtrain.inference.generator import GenerationLimits, Generator, Reply
from packtrain.inference.kv_cache import CacheLayout, Context, ContextError, RunSizes, place_runs
from packtrain.inference.parallel_answers import ParallelAnswers
from packtrain.inference.sampling import (
    CANDIDATES,
    LOGITS,
    MAX_CANDIDATES,
    TOKEN,
    Candidates,
    Chain,
    SamplerCut,
    Sampling,
    sampler_chain,
)
from packtrain.inference.sampling.candidate_cuts import base_cut, token_cut
from packtrain.inference.speculative import ModelDrafter
from packtrain.workflows.text_generation import GenerateSettings, generate
from tests.architectures import random_model
from tests.models import CONFIG, seeded_weights
from tests.test_drafting import TOKENIZER_CONFIG, RandomDrafter
from tests.test_generate import PROMPT, tokenizer

SEQUENCES = 3
LARGE = replace(CONFIG, vocab_size=700)
# settings of a chain, and what leaves the device
CHAINS: list[tuple[dict[str, Any], str]] = [
    ({}, TOKEN),
    ({"temp": 0.0}, TOKEN),
    ({"temp": 0.0, "top_k": 0, "top_n_sigma": 1.0, "tfs": 0.5}, TOKEN),
    ({"temp": 0.0, "samplers": "temperature;top_k;top_k"}, TOKEN),
    ({"temp": 1.7, "top_k": MAX_CANDIDATES, "top_p": 1.0, "min_p": 0.0}, TOKEN),
    ({"temp": 3.0, "top_k": 3, "top_p": 0.9}, TOKEN),
    ({"samplers": "top_k"}, TOKEN),
    ({"samplers": "top_k;min_p", "temp": 0.0}, TOKEN),
    ({"samplers": "top_k;temperature", "temp": 2.0}, TOKEN),
    ({"xtc_probability": 1.0, "xtc_threshold": 0.6}, TOKEN),
    ({"top_k": 1}, TOKEN),
    ({"typical": 0.7, "temp": 1.5}, CANDIDATES),
    ({"tfs": 0.9, "temp": 1.5}, CANDIDATES),
    ({"xtc_probability": 0.6, "xtc_threshold": 0.05, "temp": 1.5}, CANDIDATES),
    ({"dynatemp_range": 0.7, "temp": 1.0}, CANDIDATES),
    ({"dynatemp_range": 0.7, "temp": 0.0}, CANDIDATES),
    ({"typical": 0.5, "temp": 0.0}, CANDIDATES),
    ({"samplers": "top_k;temperature;top_p", "temp": 2.0}, CANDIDATES),
    ({"samplers": "min_p;top_k;temperature", "temp": 2.0}, CANDIDATES),
    ({"samplers": "top_k;top_k;temperature", "temp": 2.0}, CANDIDATES),
    ({"samplers": "top_k;penalties", "repeat_penalty": 1.5}, CANDIDATES),
    ({"top_k": 0}, LOGITS),
    ({"top_k": MAX_CANDIDATES + 1}, LOGITS),
    ({"samplers": "top_p;top_k"}, LOGITS),
    ({"samplers": "temperature;top_k"}, LOGITS),
    ({"samplers": ""}, LOGITS),
    ({"top_n_sigma": 1.0}, LOGITS),
    ({"repeat_penalty": 1.2}, LOGITS),
    ({"repeat_penalty": 1.2, "temp": 0.0}, LOGITS),
    ({"presence_penalty": 0.5}, LOGITS),
    ({"dry_multiplier": 0.8}, LOGITS),
    ({"logit_bias": ("3+2",)}, LOGITS),
    ({"logit_bias": ("3-2", "4+1"), "temp": 0.0}, LOGITS),
    ({"logit_bias": ("3-inf", "5-1"), "temp": 0.0}, CANDIDATES),
    ({"logit_bias": ("3-inf", "5-1"), "temp": 2.0}, CANDIDATES),
    ({"logit_bias": tuple(f"{id}-{id % 3}" for id in range(88))}, CANDIDATES),
    ({"logit_bias": tuple(f"{id}-{id % 3}" for id in range(89))}, LOGITS),
    ({"logit_bias": tuple(f"{id}-inf" for id in range(128)), "temp": 0.0}, LOGITS),
    ({"mirostat": 1}, LOGITS),
    ({"mirostat": 2, "temp": 0.0}, LOGITS),
]
each_chain = pytest.mark.parametrize(
    ("chain_options", "leaves"),
    CHAINS,
    ids=[f"{n}-{leaves}" for n, (_, leaves) in enumerate(CHAINS)],
)


@contextmanager
def on_the_host() -> Iterator[None]:
    """All logits leave the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_chain, "token_cut", lambda *args, **kwargs: SamplerCut())
        yield


def context(config: Any = LARGE, cells: int = 96, rows: int = 9) -> Context:
    session, cache, sizes = (
        Session(),
        CacheLayout(cells, max_sequences=SEQUENCES),
        RunSizes.of(cells, rows),
    )
    runs = session.executors(place_runs(config, cache, sizes))
    session.set(seeded_weights(config))
    return Context.within(config, cache, sizes, runs, SEQUENCES)


@pytest.fixture(scope="module")
def large() -> Context:
    return context()


@pytest.fixture(scope="module")
def tokenizer_context() -> Context:
    return context(TOKENIZER_CONFIG)


@pytest.fixture(scope="module")
def small() -> Context:
    return context(TOKENIZER_CONFIG)


def sequence_texts(
    ctx: Context, chains: list[Chain], count: int
) -> tuple[list[list[int]], set[type]]:
    """What each chain writes in a sequence of its own, and the types that left the device."""
    seen, ids = set[type](), [list[int]() for _ in chains]
    for seq in range(len(chains)):
        ctx.remove(seq)
    tokens, seqs = [5, 5, *range(5, 5 + len(chains))], [0, 0, *range(len(chains))]
    for _ in range(count):
        choices = ctx.choices(tokens, chains, seqs)
        seen.update(map(type, choices))
        tokens, seqs = [], [*range(len(chains))]
        for chain, choice, written in zip(chains, choices, ids, strict=True):
            tokens.append(chain.choose(choice))
            chain.accept(tokens[-1])
            written.append(tokens[-1])
    return ids, seen


KINDS = {TOKEN: int, CANDIDATES: Candidates, LOGITS: np.ndarray}


@each_chain
def test_sequences_of_a_context(large: Context, chain_options: dict[str, Any], leaves: str) -> None:
    ctx, sampling = large, Sampling(**chain_options)
    assert token_cut(base_cut(sampling), sampling, 1, 0).leaves == leaves
    different = set[int]()
    for seed in range(0, 12, SEQUENCES):
        every = [Chain(sampling, seed + n, [1, 2, 3]) for n in range(SEQUENCES)]
        chain_copies = [chain_item.copy() for chain_item in every]
        got, seen = sequence_texts(ctx, every, 10)
        assert seen == {KINDS[leaves]}
        with on_the_host():
            expected, seen = sequence_texts(ctx, chain_copies, 10)
        assert seen == {np.ndarray} and got == expected
        assert [chain.mu for chain in every] == [chain.mu for chain in chain_copies]
        different.update(*got)
    assert len(different) > 3


def test_chains_of_several_kinds_in_one_batch(large: Context) -> None:
    ctx = large
    kinds = [Sampling(**CHAINS[n][0]) for n in (0, 13, 27)]
    got, seen = sequence_texts(ctx, [Chain(kind, 4) for kind in kinds], 20)
    assert seen == {int, Candidates, np.ndarray}
    with on_the_host():
        assert sequence_texts(ctx, [Chain(kind, 4) for kind in kinds], 20)[0] == got


@each_chain
def test_replies_with_and_without_guesses(
    tokenizer_context: Context, small: Context, chain_options: dict[str, Any], leaves: str
) -> None:
    generator = Generator(tokenizer_context)

    def reply(drafter: Any = None) -> list[int]:
        draft_reply = Reply(
            generator,
            tokenizer(),
            PROMPT,
            Sampling(**chain_options),
            7,
            GenerationLimits(40),
            drafter,
            8,
        )
        "".join(draft_reply)
        return draft_reply.ids

    with on_the_host():
        expected = reply()
    guessing = ModelDrafter(Generator(small), 0.0, small.config.vocab_size)
    assert all(reply(drafter) == expected for drafter in (None, RandomDrafter(expected), guessing))


@each_chain
def test_several_answers(
    tokenizer_context: Context, chain_options: dict[str, Any], leaves: str
) -> None:

    def answers() -> list[list[int]]:
        batch = ParallelAnswers(
            tokenizer_context,
            tokenizer(),
            PROMPT,
            Sampling(**chain_options),
            (7, 8, 9),
            GenerationLimits(20),
        )
        assert [*batch]
        return [answer.ids for answer in batch.answers]

    got = answers()
    with on_the_host():
        assert answers() == got


@pytest.mark.parametrize("parallel", [1, 3])
def test_the_command(tmp_path: Path, parallel: int) -> None:
    random_model(tmp_path / "a.gguf", "llama")
    for seed in (1, 2):
        config = GenerateSettings(
            tmp_path / "a.gguf", prompt="the", n_predict=30, seed=seed, temp=1.5, parallel=parallel
        )
        got = generate(config, Events())
        with on_the_host():
            expected = generate(config, Events())
        assert (got.ids, [o.ids for o in got.others]) == (
            expected.ids,
            [o.ids for o in expected.others],
        )


def test_only_what_is_needed_leaves() -> None:
    """Logits are read from the device only for chains that need them."""
    ctx, outputs_read = context(), list[str]()
    for run in ctx.runs.values():
        for name, (backend, array) in run.outputs.items():
            run.outputs[name] = Reading(backend, name, outputs_read), array
    for n, expected in ((0, {"token"}), (13, {"ids", "values"}), (27, {"result"})):
        outputs_read.clear()
        ctx.choices([3, 4, 5], [Chain(Sampling(**CHAINS[n][0]))])
        assert set(outputs_read) == expected
    outputs_read.clear()
    ctx.choices([3, 4, 5], [], wanted=[])
    assert not outputs_read


class Reading:
    """A backend that notes which outputs are read."""

    def __init__(self, backend: Any, name: str, read: list[str]) -> None:
        self.backend, self.name, self.noted = backend, name, read

    def read(self, array: Any) -> Any:
        self.noted.append(self.name)
        return self.backend.read(array)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n", [0, 1, 13, 27])
def test_logits_that_are_not_finite_are_seen(n: int, bad: float) -> None:
    ctx = context()
    norm_weight = seeded_weights(LARGE)["output_norm.weight"]
    norm_weight[0] = bad
    ctx._session.set({"output_norm.weight": norm_weight})
    chain = Chain(Sampling(**CHAINS[n][0]))
    with pytest.raises(InputError, match="the logit of token 0 is not finite"):
        chain.choose(ctx.choices([3, 4], [chain])[0])


def test_each_row_needs_a_chain(large: Context) -> None:
    with pytest.raises(
        ContextError, match="2 results wanted, 1 chain given; each result needs one"
    ):
        large.choices([3, 4], [Chain(Sampling())], [0, 1])


def test_seeds_of_any_size(large: Context) -> None:
    ctx = large
    for seed in (0, 2**63 - 1, 2**63, 2**100):
        got, _ = sequence_texts(ctx, [Chain(Sampling(temp=2.0), seed)], 8)
        with on_the_host():
            assert sequence_texts(ctx, [Chain(Sampling(temp=2.0), seed)], 8)[0] == got


def test_settings_of_an_answer_go_with_it():
    """A client may send thousands of biases, and others the next time."""
    sampling = Sampling(logit_bias=("3-1",))
    Chain(sampling).cut()
    sampling_ref = weakref.ref(sampling)
    del sampling
    assert sampling_ref() is None
