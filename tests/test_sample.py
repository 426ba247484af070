"""Choosing a token: each part of the chain on logits made for it, against probabilities worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from packtrain.common.errors import InputError
from packtrain.inference.sampling import Chain, Sampling

NO_LIMITS = Sampling(temp=1.0, top_k=0, top_p=1.0, min_p=0.0)
LIKELY = np.array([0.1, 0.4, 0.2, 0.05, 0.25])
LOGITS = np.log(LIKELY).astype(np.float32)
COUNT = 4000


def choose_token(
    logits: np.ndarray, recent: tuple[int, ...], sampling: Sampling, seed: int, index: int
) -> int:
    chain = Chain(sampling, seed, recent)
    chain.index = index
    return chain.choose(logits)


def draw_shares(
    sampling: Sampling, recent: tuple[int, ...] = (), logits: np.ndarray = LOGITS
) -> np.ndarray:
    """How often each id is chosen in COUNT draws."""
    chosen = [choose_token(logits, recent, sampling, 1, i) for i in range(COUNT)]
    return np.bincount(chosen, minlength=len(logits)) / COUNT


def is_close(got: np.ndarray, weights: list[float]) -> bool:
    """Whether shares are within four standard errors of the weights, exactly 0 where those are."""
    expected = np.array(weights) / sum(weights)
    error = np.sqrt(expected * (1 - expected) / COUNT)
    return bool((np.abs(got - expected) <= 4 * error).all())


def test_without_limits_shares_are_the_probabilities() -> None:
    assert is_close(draw_shares(NO_LIMITS), [0.1, 0.4, 0.2, 0.05, 0.25])


def test_temperature_sharpens_and_flattens() -> None:
    assert is_close(draw_shares(replace(NO_LIMITS, temp=0.5)), list(LIKELY**2))
    assert is_close(draw_shares(replace(NO_LIMITS, temp=2.0)), list(LIKELY**0.5))


@pytest.mark.parametrize(
    ("change", "kept_ids"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [1, 4]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.0}, [1]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.6}, [1, 4]),
        ({"top_p": 0.66}, [1, 2, 4]),
        ({"min_p": 0.2}, [0, 1, 2, 4]),
        ({"min_p": 0.45}, [1, 2, 4]),
        ({"min_p": 1.0}, [1]),
        # of the three that top_k leaves, 0.4 and 0.25 are 0.76 of the whole
        ({"top_k": 3, "top_p": 0.75}, [1, 4]),
        ({"top_k": 3, "top_p": 0.78}, [1, 2, 4]),
    ],
)
def test_what_the_limits_keep(change: dict[str, float], kept_ids: list[int]) -> None:
    weights = [p if i in kept_ids else 0.0 for i, p in enumerate(LIKELY)]
    assert is_close(draw_shares(replace(NO_LIMITS, **change)), weights)


def test_limits_come_before_the_temperature() -> None:
    flat = replace(NO_LIMITS, temp=100.0, top_p=0.6)
    assert is_close(draw_shares(flat), [0, 0.4**0.01, 0, 0, 0.25**0.01])


def test_recent_tokens_are_less_likely() -> None:
    logits = np.array([2.0, -1.0, 1.0], np.float32)
    penalized = replace(NO_LIMITS, repeat_penalty=2.0)
    assert is_close(draw_shares(penalized, (0, 1, 0), logits), list(np.exp([1.0, -2.0, 1.0])))
    near_only = replace(penalized, repeat_last_n=1)
    assert is_close(draw_shares(near_only, (0, 1), logits), list(np.exp([2.0, -2.0, 1.0])))
    assert is_close(
        draw_shares(replace(penalized, repeat_last_n=0), (0,), logits), list(np.exp(logits))
    )
    whole_history = replace(penalized, repeat_last_n=-1)
    assert is_close(
        draw_shares(whole_history, (0,) + 99 * (1,), logits), list(np.exp([1.0, -2.0, 1.0]))
    )


def test_temperature_0_takes_the_likeliest_and_of_equals_the_lowest() -> None:
    greedy = Sampling(temp=0.0, repeat_penalty=4.0)
    logits = np.array([1.0, 3.0, 3.0, 2.0], np.float32)
    assert choose_token(logits, (), greedy, 0, 0) == 1
    assert choose_token(logits, (1,), greedy, 0, 0) == 2
    assert choose_token(logits, (1, 2), greedy, 0, 0) == 3
    assert logits.tolist() == [1, 3, 3, 2]


def test_of_equal_logits_top_k_keeps_the_lowest_ids() -> None:
    equal = np.zeros(50, np.float32)
    assert is_close(draw_shares(replace(NO_LIMITS, top_k=2), (), equal), [1, 1] + 48 * [0])


def test_a_draw_depends_on_seed_and_index_alone() -> None:
    logits = np.zeros(1000, np.float32)
    texts = [[choose_token(logits, (), NO_LIMITS, s, i) for i in range(8)] for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert choose_token(logits, (), NO_LIMITS, 1, 5) == texts[0][5]
    assert len(set(texts[0])) > 4


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_logits_that_are_not_finite_are_refused(bad: float, temp: float) -> None:
    logits = np.array([0, 1, bad], np.float32)
    with pytest.raises(InputError, match="the logit of token 2 is not finite"):
        choose_token(logits, (), Sampling(temp=temp), 0, 0)


def test_the_smallest_temperature_is_nearly_none():
    logits = np.array([1.0, 3.0, 2.0], np.float32)
    for temp in (1e-310, 1e-30):
        assert choose_token(logits, [], Sampling(temp=temp), 0, 0) == 1
