"""Beam search: exact where it is wide enough, greedy where it is one beam, else what full forward passes find."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from packtrain.cli.main import main
from packtrain.common.errors import InputError
from packtrain.common.events import Events
from packtrain.engine.executor import Session
from packtrain.inference.beam_search import (
    Beam,
    BeamSearch,
    BeamSearchConfig,
    log_probabilities,
    top_indices,
)
from packtrain.inference.generator import GenerationLimits, Generator, Reply
from packtrain.inference.kv_cache import CacheLayout, Context, RunSizes, place_runs
from packtrain.inference.sampling import Sampling
from packtrain.models.config import Config
from packtrain.workflows.text_generation import GenerateSettings, generate
from tests.architectures import random_model
from tests.models import CONFIG, bind_graph, logits_graph, seeded_weights
from tests.test_drafting import TOKENIZER_CONFIG
from tests.test_generate import PROMPT, tokenizer

TINY = replace(CONFIG, vocab_size=5)
WINDOWED = replace(CONFIG, vocab_size=9, window=4, window_pattern=(True, False))
END = 2


class Letters:
    """A vocabulary of tokens 0, 1, … whose token 2 ends texts; what a search needs of it."""

    eog_ids, strips_leading_space, token_types = (END,), False, [1] * 64

    def piece(self, id: int) -> bytes:
        return bytes((48 + id,))


@lru_cache
def context(config: Config, width: int, cells: int = 64, ring: int = 0) -> Context:
    session, sizes = Session(), RunSizes.of(cells, width)
    cache = CacheLayout(cells, ring, max_sequences=width)
    runs = session.executors(place_runs(config, cache, sizes, has_moves=True))
    session.set(seeded_weights(config))
    return Context.within(config, cache, sizes, runs, width)


def run_search(
    config: Config,
    prompt: Sequence[int],
    search: BeamSearchConfig,
    count: int,
    ring: int = 0,
    **limit_options: object,
) -> list[Beam]:
    ctx = context(config, search.width, ring=ring)
    for seq in range(search.width):
        ctx.remove(seq)
    return BeamSearch(
        ctx, Letters(), prompt, search, GenerationLimits(count, **limit_options)
    ).run()  # type: ignore[arg-type]


@lru_cache
def forward(config: Config, time: int) -> Callable[[dict[str, np.ndarray]], Mapping]:
    return bind_graph(logits_graph(config, 1, time), seeded_weights(config))


@lru_cache
def next_logprobs(config: Config, text: tuple[int, ...]) -> np.ndarray:
    """Log-probabilities of the token after a text, by a forward pass over all of it."""
    at = np.arange(len(text), dtype=np.int32)[None]
    batch = {"tokens": np.array([text], np.int32), "pos": at, "seq": np.zeros_like(at)}
    return log_probabilities(forward(config, len(text))(batch)["logits"].reshape(len(text), -1)[-1])


def text_logprob(config: Config, prompt: tuple[int, ...], ids: Sequence[int]) -> float:
    return sum(next_logprobs(config, (*prompt, *ids[:n]))[id] for n, id in enumerate(ids))


def all_texts(config: Config, count: int) -> Iterator[tuple[int, ...]]:
    """All texts of `count` tokens, and all that end earlier."""
    non_end_ids = [id for id in range(config.vocab_size) if id != END]
    for length in range(1, count + 1):
        for begin in product(non_end_ids, repeat=length - 1):
            yield from (
                (*begin, id) for id in range(config.vocab_size) if length == count or id == END
            )


@pytest.mark.parametrize("prompt", [(1,), (0, 3, 4), (4, 4, 1, 0)])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("count", [2, 3])
def test_a_search_wide_enough_finds_the_best_of_all_texts(
    prompt: tuple[int, ...], penalty: float, count: int
):
    width = TINY.vocab_size ** (count - 1)  # for two tokens, the vocabulary
    scores = {
        ids: text_logprob(TINY, prompt, ids) / len(ids) ** penalty for ids in all_texts(TINY, count)
    }
    expected = sorted(scores, key=lambda ids: -scores[ids])[:4]
    got = run_search(TINY, prompt, BeamSearchConfig(width, 4, penalty), count)
    assert [beam.ids for beam in got] == expected
    assert [beam.score(penalty) for beam in got] == pytest.approx(
        [scores[ids] for ids in expected], rel=1e-5
    )
    assert [beam.end_reason for beam in got] == [
        "end" if ids[-1] == END else "count" for ids in expected
    ]


def reference_search(
    config: Config, prompt: tuple[int, ...], search: BeamSearchConfig, count: int
) -> list[tuple[int, ...]]:
    """The search over full forward passes, which never ends early."""
    live_beams, finished = [((), 0.0)], list[tuple[float, tuple[int, ...]]]()
    for _ in range(count):
        longer = [
            ((*ids, id), sum + value)
            for ids, sum in live_beams
            for id, value in enumerate(next_logprobs(config, (*prompt, *ids)))
        ]
        longer.sort(key=lambda beam: -beam[1])
        for ids, sum in longer[: search.width]:
            if ids[-1] == END:
                finished.append((sum / len(ids) ** search.penalty, ids))
        live_beams = [beam for beam in longer if beam[0][-1] != END][: search.width]
    finished += [(sum / count**search.penalty, ids) for ids, sum in live_beams]
    return [ids for _, ids in sorted(finished, key=lambda beam: -beam[0])[: search.num_beams]]


@pytest.mark.parametrize("penalty", [0.0, 1.0, 3.0])
@pytest.mark.parametrize(("config", "ring"), [(CONFIG, 0), (WINDOWED, 0), (WINDOWED, 40)])
@pytest.mark.parametrize("width", [2, 3, 6])
def test_it_finds_what_full_forward_passes_find(
    config: Config, ring: int, width: int, penalty: float
):
    for prompt in ((1, 4, 3), (7, 0, 5, 5, 6)):
        search = BeamSearchConfig(width, 2, penalty)
        got = [beam.ids for beam in run_search(config, prompt, search, 9, ring)]
        assert got == reference_search(config, prompt, search, 9)


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.5])
def test_the_search_ends_when_nothing_better_can_come(penalty: float):
    ctx, prompt, search = context(TINY, 4, ring=0), (1, 3), BeamSearchConfig(4, 2, penalty)
    got = run_search(TINY, prompt, search, 14)
    assert [beam.ids for beam in got] == reference_search(TINY, prompt, search, 14)
    assert {beam.end_reason for beam in got} == {"end"}
    assert max(ctx.next(seq) for seq in range(4)) < len(prompt) + 13


@pytest.mark.parametrize("seed", range(4))
def test_one_beam_is_greedy(seed: int):
    def fresh() -> Context:
        session, cache, sizes = Session(), CacheLayout(64), RunSizes.of(64, 1)
        runs = session.executors(place_runs(TOKENIZER_CONFIG, cache, sizes))
        session.set(seeded_weights(TOKENIZER_CONFIG, seed))
        return Context.within(TOKENIZER_CONFIG, cache, sizes, runs)

    for penalty in (0.0, 1.0):
        beams = BeamSearch(
            fresh(), tokenizer(), PROMPT, BeamSearchConfig(1, penalty=penalty), GenerationLimits(40)
        )
        (beam,) = beams.run()
        reply = Reply(
            Generator(fresh()), tokenizer(), PROMPT, Sampling(temp=0), 0, GenerationLimits(40)
        )
        assert "".join(reply) == beams.beam_text(beam)
        assert (beam.ids[: len(reply.ids)], beam.end_reason) == (tuple(reply.ids), reply.end_reason)


def test_beams_share_cells_and_none_is_copied(monkeypatch: pytest.MonkeyPatch):
    ctx = context(CONFIG, 6, ring=0)
    monkeypatch.setattr(
        Context, "_move_cells", lambda self, moves: pytest.fail() if moves else None
    )
    prompt, count = tuple(range(10, 22)), 9
    run_search(CONFIG, prompt, BeamSearchConfig(6), count)
    texts = [tuple(ctx.tokens(seq)) for seq in range(6) if ctx.next(seq)]
    beginnings = {text[:n] for text in texts for n in range(1, len(text) + 1)}
    used = np.count_nonzero(ctx.pools.all.sets)
    assert len(texts) == 6
    assert used == len(beginnings) < sum(map(len, texts))
    assert all(text[: len(prompt)] == prompt for text in texts)


def test_a_stop_text_ends_a_beam_and_a_bias_forbids_a_token():
    prompt, search = (1, 4, 3), BeamSearchConfig(3, 1, 0.0)
    (free,) = run_search(CONFIG, prompt, search, 6)
    stop = chr(48 + free.ids[1])
    limits, wide_search = GenerationLimits(6, (stop,)), replace(search, num_beams=20)
    beams = BeamSearch(context(CONFIG, 3, ring=0), Letters(), prompt, wide_search, limits)  # type: ignore[arg-type]
    stopped = [beam for beam in beams.run() if beam.end_reason == "stop"]
    assert free.ids[:2] in {beam.ids for beam in stopped}
    assert not any(stop in beams.beam_text(beam) for beam in stopped)
    banned = run_search(CONFIG, prompt, replace(search, logit_bias={free.ids[0]: -np.inf}), 6)
    assert free.ids[0] not in banned[0].ids


def test_a_full_context_and_an_interruption_end_all():
    ctx = context(CONFIG, 4)
    beams = BeamSearch(ctx, Letters(), [9] * 20, BeamSearchConfig(4, 2, 5.0), GenerationLimits())  # type: ignore[arg-type]
    got = beams.run()
    assert {beam.end_reason for beam in got} <= {"context", "end"} and len(got) == 2
    stopped = run_search(CONFIG, (1, 2), BeamSearchConfig(4), 50, is_interrupted=lambda: True)
    assert [(beam.ids, beam.end_reason) for beam in stopped] == [((), "interrupted")]


def test_equal_values_come_in_order():
    assert top_indices(np.array([1.0, 3, 2, 3, 3]), 2).tolist() == [1, 3]
    assert top_indices(np.array([1.0, 3]), 5).tolist() == [1, 0]


# ---- the command


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("beams") / "a.gguf"
    random_model(path, "gemma3")
    return path


def test_the_command_prints_the_best(path: Path, capsys: pytest.CaptureFixture[str]):
    settings = GenerateSettings(path, prompt="the cat", n_predict=6, num_beams=4, parallel=3)
    best = generate(settings, Events())
    scores = [answer.score for answer in (best, *best.others)]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    command = ["generate", str(path), "-p", "the cat", "-n", "6", "--beams", "4"]
    assert main(command) == 0
    said = capsys.readouterr()
    assert said.out == f"the cat{best.text}\n"
    assert f"score {best.score:.4f}; ended by the number of tokens" in said.err
    assert main([*command, "-np", "3"]) == 0
    texts = [
        f"--- {n} , score {answer.score:.4f} ---\n{answer.text}"
        for n, answer in enumerate((best, *best.others), 1)
    ]
    assert capsys.readouterr().out == "\n\n".join(texts).replace(" , ", ", ") + "\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"parallel": 5}, "--parallel is 5, and --num-beams 4 follows fewer texts"),
        ({"temp": 1.0}, "--temp has no effect with --num-beams, which searches for the likeliest text"),
        ({"draft_lookup": True}, "--draft-lookup has no effect with --num-beams"),
        ({"grammar": "root ::= [a]"}, "--grammar has no effect with --num-beams"),
        ({"num_beams": 0, "length_penalty": 2.0}, "--length-penalty has no effect without --num-beams"),
    ],
)  # fmt: skip
def test_what_is_refused(path: Path, options: dict, said: str):
    settings = GenerateSettings(path, prompt="the", num_beams=4)
    with pytest.raises(InputError, match=said):
        generate(replace(settings, **options), Events())
