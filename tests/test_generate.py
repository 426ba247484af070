"""Text from a model: logits against an independent forward pass however the prompt is cut, and every way to end."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from packtrain import Session
from packtrain.common.errors import InputError
from packtrain.data.tokenizer import Tokenizer
from packtrain.inference.generator import GenerationLimits, Generator, Reply
from packtrain.inference.kv_cache import CacheLayout, Context, RunSizes, place_runs
from packtrain.inference.sampling import Chain, SamplerInput, Sampling
from packtrain.models.config import Config
from packtrain.models.model_file import open_model
from packtrain.models.model_metadata import model_metadata
from tests.models import bind_graph, seeded_weights
from tests.models import logits_graph as full_logits
from tests.numpy_models import Model
from tests.test_model_file import CONFIG, STORIES, TOKENS, needs_shared, vocabulary

TOLERANCE = 1e-4
GREEDY = Sampling(temp=0.0)
STORY = (
    ", there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, red"
    " ball. She wanted to play with it, but it was too high.\nLily's mom said"
)


def generator(
    config: Config,
    leaf_values: dict[str, np.ndarray],
    cells: int,
    chunks: tuple[int, ...] = (8, 1),
) -> Generator:
    session, cache, sizes = Session(), CacheLayout(cells), RunSizes(chunks, 1)
    runs = session.executors(place_runs(config, cache, sizes))
    built = Generator(Context.within(config, cache, sizes, runs))
    session.set(leaf_values)
    return built


def stories_model(cells: int, chunks: tuple[int, ...] = (64, 8, 1)) -> tuple[Generator, Tokenizer]:
    model = open_model(STORIES)
    weights = {name: model.weight(name) for name in model.weight_names}
    return generator(model.config, weights, cells, chunks), model.tokenizer()


def reference_model(config: Config, weights: dict[str, np.ndarray]) -> Model:
    """The forward pass to compare with."""
    keys = {key: value.value for key, value in model_metadata(config, "m").items()}
    return Model(keys, weights, config.context_length)


# ---- logits


@pytest.mark.parametrize("chunks", [(1,), (8, 1), (64, 8, 1)])
def test_any_cutting_gives_the_logits_of_the_forward_pass(chunks: tuple[int, ...]) -> None:
    weights, tokens = (
        seeded_weights(CONFIG),
        np.random.RandomState(0).randint(0, CONFIG.vocab_size, 30),
    )
    expected = reference_model(CONFIG, weights).logits(tokens)
    incremental = generator(CONFIG, weights, 32, chunks)
    for count in (24, 17, 1):
        incremental.truncate()
        assert (
            np.abs(incremental.feed(tokens[:count].tolist()) - expected[count - 1]).max()
            < TOLERANCE
        )
    assert incremental.context.next(incremental.seq) == incremental.size - 31


@needs_shared
@pytest.mark.parametrize("chunks", [(1,), (64, 8, 1)])
def test_a_real_model_gives_the_logits_of_the_forward_pass(chunks: tuple[int, ...]) -> None:
    model = open_model(STORIES)
    weights = {name: model.weight(name) for name in model.weight_names}
    tokens = model.tokenizer().encode("Once upon a time" + STORY)[:64]
    expected = reference_model(model.config, weights).logits(np.array(tokens))
    incremental = generator(model.config, weights, 64, chunks)
    got = (
        [incremental.feed([token]) for token in tokens]
        if chunks == (1,)
        else [incremental.feed(tokens)]
    )
    assert len(tokens) == 64
    assert np.abs(got - expected[-len(got) :]).max() < TOLERANCE

    line = np.arange(64, dtype=np.int32)[None]
    fed = {"tokens": np.array(tokens, np.int32)[None], "pos": line, "seq": np.zeros_like(line)}
    forward_logits = bind_graph(full_logits(model.config, 1, 64), weights)(fed)["logits"][0]
    assert np.abs(forward_logits - expected).max() < TOLERANCE


@needs_shared
def test_a_real_model_tells_its_story() -> None:
    story_generator, tokenizer = stories_model(128)
    reply = Reply(
        story_generator,
        tokenizer,
        tokenizer.encode("Once upon a time"),
        GREEDY,
        0,
        GenerationLimits(64),
    )
    assert "".join(reply) == STORY
    assert reply.end_reason == "count" and len(reply.ids) == 64
    assert (reply.reading.tokens, reply.writing.tokens) == (5, 63)


@needs_shared
def test_a_seed_gives_the_same_text_again_and_for_any_cutting() -> None:
    texts = []
    for seed, chunks in ((1, (64, 8, 1)), (1, (8, 1)), (2, (8, 1))):
        story_generator, tokenizer = stories_model(64, chunks)
        prompt = tokenizer.encode("Lily and the dog went to the park")
        first, second = (
            "".join(
                Reply(story_generator, tokenizer, prompt, Sampling(), seed, GenerationLimits(24))
            )
            for _ in range(2)
        )
        assert first == second
        texts.append(first)
    assert texts[0] == texts[1] != texts[2]


def test_a_text_that_goes_on_is_fed_from_where_it_differs() -> None:
    weights, tokens = seeded_weights(CONFIG), list(range(20, 44))
    incremental = generator(CONFIG, weights, 32)
    incremental.feed(tokens)
    diverged = [*tokens[:9], 5, 6, 7]
    for text, new in ((diverged, 3), (diverged, 1), ([9, 8], 2)):
        left = incremental.reuse_prefix(text)
        assert len(left) == new
        expected = reference_model(CONFIG, weights).logits(np.array(text))[-1]
        assert np.abs(incremental.feed(left) - expected).max() < TOLERANCE
        assert incremental.cached_tokens == text
        assert incremental.context.next(incremental.seq) == len(text)


# ---- ends: a model that says what it is told to


class Parrot:
    """Stands for a Generator: whatever it is fed, the likeliest next token is the next of its line."""

    def __init__(self, line: Sequence[int], size: int = 99) -> None:
        self.line, self.size, self.fed = list(line), size, list[int]()

    @property
    def cells_left(self) -> int:
        return self.size - len(self.fed)

    def reuse_prefix(self, tokens: Sequence[int]) -> Sequence[int]:
        self.fed.clear()
        return tokens

    def tokens_to_feed(self, text: Sequence[int]) -> Sequence[int]:
        return text[-1:]

    def step(self, tokens: Sequence[int], chain: Chain) -> tuple[list[SamplerInput], Sequence[int]]:
        self.fed.append(tokens[0])
        logits = np.zeros(len(TOKENS), np.float32)
        logits[self.line[max(len(self.fed) - len(PROMPT), 0)]] = 9
        return [] if tokens[1:] else [logits], tokens[1:]


IDS = {text: id for id, text in enumerate(TOKENS)}
PROMPT = (IDS["<s>"], IDS["\u2581a"])


def ids(*texts: str) -> list[int]:
    return [IDS[text] for text in texts]


def tokenizer() -> Tokenizer:
    return Tokenizer({key: value.value for key, value in vocabulary().items()})


def reply_pieces(
    line: list[int], limits: GenerationLimits, size: int = 99
) -> tuple[list[str], Reply]:
    """The pieces of a reply that are not empty."""
    reply = Reply(Parrot(line, size), tokenizer(), PROMPT, GREEDY, 0, limits)  # type: ignore[arg-type]
    return [piece for piece in reply if piece], reply


HAT = ids("\u2581the", "\u2581", "h", "a", "t", "\n", "</s>", "a")


def test_an_end_token_ends_and_is_no_text() -> None:
    pieces, reply = reply_pieces(HAT, GenerationLimits())
    assert pieces == [" the", " ", "h", "a", "t", "\n"]
    assert reply.end_reason == "end" and reply.ids == HAT[:6]


def test_the_count_ends() -> None:
    pieces, reply = reply_pieces(HAT, GenerationLimits(2))
    assert pieces == [" the", " "] and reply.end_reason == "count" and reply.writing.tokens == 1
    pieces, reply = reply_pieces(HAT, GenerationLimits(0))
    assert pieces == [] and reply.end_reason == "count" and reply.reading.tokens == 0


def test_a_full_context_ends() -> None:
    pieces, reply = reply_pieces(HAT, GenerationLimits(), size=4)
    assert pieces == [" the", " ", "h"] and reply.end_reason == "context"


def test_stop_texts_are_no_text_and_what_may_become_one_waits() -> None:
    pieces, reply = reply_pieces(HAT, GenerationLimits(stops=(" hat",)))
    assert pieces == [" the"] and reply.end_reason == "stop"
    pieces, reply = reply_pieces(HAT, GenerationLimits(stops=(" ham", "at\n\n")))
    assert pieces == [" the", " h", "at\n"] and reply.end_reason == "end"
    pieces, reply = reply_pieces(HAT, GenerationLimits(stops=("t\n", "e", "th")))
    assert pieces == [" "] and reply.end_reason == "stop"


def test_an_interruption_keeps_what_there_is() -> None:
    interrupt_flags = iter([False] * 4 + [True])
    pieces, reply = reply_pieces(
        HAT, GenerationLimits(is_interrupted=lambda: next(interrupt_flags))
    )
    assert pieces == [" the", " ", "h"] and reply.end_reason == "interrupted"


def test_a_prompt_can_be_interrupted() -> None:
    interrupt_flags = iter([False, True])
    pieces, reply = reply_pieces(
        HAT, GenerationLimits(is_interrupted=lambda: next(interrupt_flags))
    )
    assert pieces == [] and reply.end_reason == "interrupted" and reply.reading.tokens == 1


def test_characters_come_whole() -> None:
    heart = [IDS[f"<0x{b:02X}>"] for b in "\u2665".encode()]
    pieces, _ = reply_pieces([*heart, *heart[:2], IDS["</s>"]], GenerationLimits())
    assert pieces == ["\u2665", "\ufffd"]


def test_prompts_that_cannot_be_fed() -> None:
    with pytest.raises(InputError, match="the prompt has no tokens"):
        Reply(generator(CONFIG, seeded_weights(CONFIG), 4), tokenizer(), [], GREEDY, 0)
    with pytest.raises(InputError, match="has 5 tokens and the context 4"):
        Reply(generator(CONFIG, seeded_weights(CONFIG), 4), tokenizer(), 5 * [1], GREEDY, 0)


def test_weights_are_the_sessions_own() -> None:
    weights, session = seeded_weights(CONFIG), Session()
    cache, sizes = CacheLayout(8), RunSizes((8, 1), 1)
    runs = session.executors(place_runs(CONFIG, cache, sizes))
    incremental = Generator(Context.within(CONFIG, cache, sizes, runs))
    session.set(weights)
    before = incremental.feed([5])
    session.set({"output_norm.weight": weights["output_norm.weight"] * 2})
    incremental.truncate()
    assert np.allclose(incremental.feed([5]), 2 * before, rtol=1e-5)


def test_untied_heads_and_other_bases_are_followed() -> None:
    config = replace(CONFIG, tied=False, rope_freq_base=100.0, rms_eps=0.1)
    weights, tokens = seeded_weights(config), list(range(20, 30))
    expected = reference_model(config, weights).logits(np.array(tokens))[-1]
    assert np.abs(generator(config, weights, 16).feed(tokens) - expected).max() < TOLERANCE
