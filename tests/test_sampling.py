"""Every sampler: llama.cpp's cases (tests/test-sampling.cpp, rewritten), its defaults, and chains against formulas that
share no line with packtrain."""

import math
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from packtrain.common.errors import InputError
from packtrain.inference.sampling import (
    SAMPLER_ORDER,
    Candidates,
    Chain,
    Sampling,
    find_breakers,
    token_rng,
)
from packtrain.inference.sampling.dry import dry_penalty
from packtrain.inference.sampling.samplers import (
    dynamic_temperature,
    infill,
    logit_bias,
    min_p,
    mirostat,
    mirostat_2,
    probabilities,
    recent_penalties,
    tail_free,
    temperature,
    top_k,
    top_n_sigma,
    top_p,
    typical,
    update_mu,
    xtc,
)
from packtrain.inference.sampling.sampling_settings import canonical_name

FOUR = (0.1, 0.2, 0.3, 0.4)
RISING = np.arange(1, 10_001)


def candidates_of(weights, order=False) -> Candidates:
    """Candidates with these probabilities; zeros are left out as llama.cpp's expected values are."""
    weights = np.asarray(weights, float)
    return Candidates(np.arange(len(weights)), np.log(weights).astype(np.float32).astype(float))


def shares(c: Candidates, count: int) -> np.ndarray:
    """Probabilities by id."""
    p = np.zeros(count)
    p[c.ids] = probabilities(c.logits)
    return p


def check_shares(c: Candidates, expected) -> None:
    np.testing.assert_allclose(shares(c, len(expected)), expected, atol=1e-5)


@pytest.mark.parametrize(("temp", "expected"), [(1.0, FOUR), (0.0, (0, 0, 0, 1))])
def test_temperature(temp, expected):
    check_shares(temperature(candidates_of(FOUR), temp), expected)
    check_shares(dynamic_temperature(candidates_of(FOUR), temp, 0.0, 1.0), expected)


def test_dynamic_temperature_follows_the_entropy():
    p = np.array(FOUR)
    share = -(p * np.log(p)).sum() / np.log(4)
    temp = 0.3 + (1.7 - 0.3) * share**2
    check_shares(
        dynamic_temperature(candidates_of(FOUR), 1.0, 0.7, 2.0),
        p ** (1 / temp) / (p ** (1 / temp)).sum(),
    )
    # all alike: the highest; a range beyond the temperature starts at 0
    even = dynamic_temperature(candidates_of([0.25] * 4), 0.5, 1.0, 1.0)
    check_shares(even, [0.25] * 4)


@pytest.mark.parametrize(
    ("k", "expected"),
    [(1, (0, 0, 0, 1)), (3, (0, 0.22222, 0.33333, 0.44444)), (4, FOUR), (0, FOUR)],
)
def test_top_k(k, expected):
    check_shares(top_k(candidates_of(FOUR), k), expected)


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (0.0, (0, 0, 0, 1)),
        (
            0.69999,
            (0, 0, 0.428571, 0.571429),
        ),  # llama.cpp's 0.7, where its sum in float32 is just above
        (0.8, (0, 0.22222, 0.33333, 0.44444)),
        (1.0, FOUR),
    ],
)
def test_top_p(p, expected):
    check_shares(top_p(candidates_of(FOUR), p), expected)


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (0.0, FOUR),
        (0.24, FOUR),
        (0.26, (0, 0.2 / 0.9, 0.3 / 0.9, 0.4 / 0.9)),
        (0.49, (0, 0.2 / 0.9, 0.3 / 0.9, 0.4 / 0.9)),
        (0.51, (0, 0, 0.3 / 0.7, 0.4 / 0.7)),
        (0.74, (0, 0, 0.3 / 0.7, 0.4 / 0.7)),
        (0.76, (0, 0, 0, 1)),
        (1.0, (0, 0, 0, 1)),
        (1.05, (0, 0, 0, 1)),
    ],
)
def test_min_p(p, expected):
    check_shares(min_p(candidates_of(FOUR), p), expected)


@pytest.mark.parametrize(
    ("threshold", "kept_ids"),
    [(0.09, [3]), (0.19, [2, 3]), (0.29, [1, 2, 3]), (0.39, [0, 1, 2, 3])],
)
def test_xtc(threshold, kept_ids):
    rng = token_rng(0, 0)
    assert rng.random() < 0.99  # so that it is applied
    got = xtc(candidates_of((0.4, 0.3, 0.2, 0.1)), 0.99, threshold, token_rng(0, 0))
    assert sorted(got.ids.tolist()) == kept_ids


def test_xtc_is_applied_as_often_as_asked_and_never_over_a_half():
    c = candidates_of((0.4, 0.3, 0.2, 0.1))
    hits = sum(len(xtc(c, 0.3, 0.15, token_rng(5, i)).ids) < 4 for i in range(2000))
    assert abs(hits / 2000 - 0.3) < 4 * math.sqrt(0.21 / 2000)
    assert len(xtc(c, 1.0, 0.51, token_rng(0, 0)).ids) == 4


def test_typical():
    assert typical(candidates_of((0.97, 0.01, 0.01, 0.01)), 0.5).ids.tolist() == [0]
    assert sorted(typical(candidates_of((0.4, 0.2, 0.2, 0.2)), 0.5).ids.tolist()) == [1, 2, 3]
    assert len(typical(candidates_of((0.4, 0.2, 0.2, 0.2)), 1.0).ids) == 4


EVEN = [0.2] * 5


@pytest.mark.parametrize(
    ("last", "expected", "settings"),
    [
        ([0], (0, 0.25, 0.25, 0.25, 0.25), (50, 0, 0)),
        ([0, 1, 2], (0, 0, 0, 0.5, 0.5), (50, 0, 0)),
        ([0, 1, 2, 0, 0], (0, 0, 0, 0.5, 0.5), (50, 0, 0)),
        ([0], (0.000011, 0.249997, 0.249997, 0.249997, 0.249997), (1, 5, 5)),
        ([0, 1, 2], (0.000023, 0.000023, 0.000023, 0.499966, 0.499966), (1, 5, 5)),
        ([0, 1, 2, 0, 0], (0.0, 0.000023, 0.000023, 0.499977, 0.499977), (1, 5, 5)),
    ],
)
def test_penalties(last, expected, settings):
    check_shares(recent_penalties(candidates_of(EVEN), last, *settings), expected)


@pytest.mark.parametrize(
    ("last", "expected", "settings", "breakers"),
    [
        ([0, 1], [0.25] * 4, (1.0, 1.1, 2), {}),
        ([0, 1, 2, 0, 1], (0.296923, 0.296923, 0.109232, 0.296923), (1.0, 1.1, 2), {}),
        ([0, 1, 3, 4, 0, 1], [0.2] * 5, (1.0, 1.1, 2), {3: [()]}),
        ([0, 1, 2, 0, 1], (0.241818, 0.241818, 0.032727, 0.241818, 0.241818), (2.0, 1.1, 2), {}),
        ([0, 1, 2, 3, 4, 0, 1], [0.2] * 5, (1.0, 1.1, 4), {}),
    ],
)
def test_dry(last, expected, settings, breakers):
    check_shares(
        dry_penalty(candidates_of([1 / len(expected)] * len(expected)), last, breakers, *settings),
        expected,
    )


def repeat_length(text: list[int], id: int, max_length: int) -> int:
    """The longest end of the text that occurred before `id`, tried one by one."""
    best = 0
    for at in range(1, len(text)):
        if text[at] == id:
            n = 0
            while n < at and n < len(text) and text[at - 1 - n] == text[-1 - n]:
                n += 1
            best = max(best, min(n, max_length))
    return best


def test_dry_finds_the_longest_repetition_in_any_text():
    rng = np.random.default_rng(0)
    for _ in range(300):
        text = rng.integers(0, 3, rng.integers(3, 30)).tolist()
        got = dry_penalty(candidates_of([1 / 3] * 3), text, {}, 0.5, 1.5, 2).logits - math.log(
            1 / 3
        )
        lengths = [repeat_length(text, id, len(text)) for id in range(3)]
        expected = [-0.5 * 1.5 ** (n - 2) if n >= 2 else 0.0 for n in lengths]
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_dry_breakers_are_found_in_pieces_and_across_them():
    pieces = [b"a", b"x:y", b":", b"\nab", b"zU", b"SER"]
    breakers = find_breakers([":", "USER"], pieces, lambda text: [5] if text == "SER" else [9])
    assert breakers == {1: ((),), 2: ((),), 4: ((5,),)}
    large_table = find_breakers([*"abcd", "e"], [b"abcd"] * 999, lambda text: [9])
    assert (
        len({*map(id, large_table.values())}) == 1
    )  # equal values are one: a client may name many
    text = [0, 1, 4, 5, 0, 1, 4, 5, 0, 1]  # `zU SER` ends what repeats: only 0 1 do
    even = candidates_of([*EVEN, 0.2])
    assert (dry_penalty(even, text, breakers, 1.0, 2.0, 3).logits == even.logits).all()
    assert (dry_penalty(even, text, {}, 1.0, 2.0, 3).logits != even.logits).any()


def test_the_penalty_of_dry_is_bounded():
    got = dry_penalty(candidates_of([0.5, 0.5]), [0] * 300, {}, 1.0, 1.75, 2).logits
    assert np.isfinite(got).all() and got[0] < -1e30
    assert dry_penalty(candidates_of([0.5, 0.5]), [0] * 300, {}, 1.0, 1e300, 0).logits[0] == -1e300


@pytest.mark.parametrize(
    ("n", "expected"), [(1.0, (0, 0, 0.428571, 0.571429)), (0.0, FOUR), (-1.0, FOUR), (3.0, FOUR)]
)
def test_top_n_sigma(n, expected):
    check_shares(top_n_sigma(candidates_of(FOUR), n), expected)


def test_tail_free():
    p = np.array([0.5, 0.2, 0.15, 0.1, 0.05])
    curve = np.abs(np.diff(p, 2))  # 0.25, 0, 0
    assert np.allclose(curve, [0.25, 0.0, 0.0], atol=1e-9)
    assert tail_free(candidates_of(p), 0.95).ids.tolist() == [0]
    p = np.array([0.4, 0.3, 0.1, 0.1, 0.1])  # 0.1, 0.2, 0: a third, then all
    assert tail_free(candidates_of(p), 0.5).ids.tolist() == [0]
    assert len(tail_free(candidates_of(p), 1.0).ids) == 5


def surviving_ids(steps: str, k: int, p: float, share: float) -> list[int]:
    """Of weights 0 to 9999 which ids stay: counted, not sampled."""
    ids = np.arange(10_000)[::-1]
    for step in steps:
        if step == "k":
            ids = ids[:k]
        elif step == "p":
            cutoffs = np.flatnonzero(np.cumsum(ids) >= p * ids.sum())
            ids = ids[: cutoffs[0] + 1] if p < 1 else ids
        else:
            ids = ids[ids >= share * ids[0]]
    return sorted(ids.tolist())


QUEUES = [("k", 10_000, 1.0, 1.0), ("k", 1, 1.0, 1.0), ("p", 1, 0.0, 1.0), ("k", 100, 1.0, 1.0)]
QUEUES += [("p", 1, 0.0003, 1.0), ("p", 1, 0.8, 1.0), ("m", 1, 1.0, 0.99978), ("m", 1, 1.0, 0.1)]
QUEUES += [("".join(q), 100, 0.8, 0.1) for n in (2, 3) for q in permutations("kpm", n)]


@pytest.mark.parametrize(("steps", "k", "p", "share"), QUEUES)
def test_queues(steps, k, p, share):
    with np.errstate(divide="ignore"):
        c = Candidates(np.arange(10_000), np.log(np.arange(10_000)))
    for step in steps:
        c = {
            "k": lambda c: top_k(c, k),
            "p": lambda c: top_p(c, p),
            "m": lambda c: min_p(c, share),
        }[step](c)
    assert sorted(c.ids.tolist()) == surviving_ids(steps, k, p, share)


def test_mirostat_2_cuts_at_mu_and_learns():
    c = candidates_of((0.5, 0.25, 0.125, 0.125))
    assert mirostat_2(c, 2.01).ids.tolist() == [0, 1]
    assert mirostat_2(c, 0.5).ids.tolist() == [0]
    assert len(mirostat_2(c, 3.01).ids) == 4
    assert update_mu(c, 1, 4.0, 5.0, 0.1) == pytest.approx(4.0 - 0.1 * (2 - 5))


def test_mirostat_takes_as_many_as_a_zipf_law_says():
    s, mu, count = 1.5, 3.0, 1000
    weights = np.arange(1, count + 1.0) ** -s
    exponent = s - 1
    k = (exponent * 2**mu / (1 - count**-exponent)) ** (1 / s)
    got = mirostat(candidates_of(weights), mu, count)
    assert got.ids.tolist() == list(range(int(k)))


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_holds_the_surprise_near_its_target(version):
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal(2000) * 3).astype(np.float32)
    surprise = -np.log2(probabilities(logits.astype(float)))
    chain = Chain(Sampling(mirostat=version, mirostat_ent=4.0, temp=1.0), 1)
    seen = []
    for _ in range(600):
        seen.append(surprise[id := chain.choose(logits)])
        chain.accept(id)
    # surprise is measured among the candidates, a little below that among all
    assert abs(np.mean(seen[200:]) - 4.0) < 0.7


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"temp": math.nan}, "temp is nan; it must be finite"),
        ({"temp": -1}, "temp is -1.0; it must be 0 or more"),
        ({"top_p": 2}, "top_p is 2.0; it must be from 0 to 1"),
        ({"top_k": "many"}, "top_k is 'many'; it must be a whole number"),
    ],
)
def test_settings_out_of_range(settings, line):
    with pytest.raises(InputError, match=line):
        Sampling(**settings)


def test_settings_may_be_numbers_of_numpy():
    settings = Sampling(top_k=np.int64(3), temp=np.float32(0.5), top_p=np.float64(1))
    assert settings == Sampling(top_k=3, temp=0.5, top_p=1.0) and type(settings.top_k) is int


def test_biases():
    assert logit_bias(candidates_of(FOUR), {1: -math.inf, 2: 1.0}).logits[1] == -math.inf
    logits = np.log(FOUR).astype(np.float32)
    assert Chain(Sampling(temp=0, logit_bias=("3-inf", "0+9.5"))).choose(logits) == 0
    assert Chain(Sampling(temp=0, logit_bias=("3-inf",))).choose(logits) == 2
    with pytest.raises(InputError, match="no token is left"):
        Chain(Sampling(logit_bias=tuple(f"{i}-inf" for i in range(4)))).choose(logits)


@pytest.mark.parametrize("bias", ["3+1e31", "12", "x+1", "3*2", "3+", "3+inf", "3+nan", "-1+2"])
def test_biases_that_cannot_be_read(bias):
    with pytest.raises(InputError, match="logit_bias is"):
        Sampling(logit_bias=(bias,)).check_sampling()
    with pytest.raises(InputError, match="there is no token 9"):
        Sampling(logit_bias=("9+1",)).check_sampling(9)


PIECES = [b"", b"a", b"ab", b"b", *(bytes([x]) for x in range(100, 112))]


@pytest.mark.parametrize("probs, kept_ids", [
    ({0: 0.1, 1: 0.5, 3: 0.4}, [0]),  # three times the end is more than a third of the texts
    ({0: 0.01, 1: 0.3, 2: 0.3, 3: 0.39}, [0, 1, 3]),  # a and ab are one
    ({0: 0.01, 1: 0.25, 2: 0.3, 3: 0.44}, [0, 2, 3]),  # which is the likelier one
    ({0: 0.01, 1: 0.7, 3: 0.29}, [0, 1]),  # of two each must have a third
    ({0: 0.001, **dict.fromkeys(range(4, 14), 0.0999)}, [0]),  # no text is likely
    ({1: 0.4, 3: 0.6}, [1, 3]),
])  # fmt: skip
def test_infill(probs, kept_ids):
    ids, p = np.array([*probs]), np.array([*probs.values()])
    candidates = infill(Candidates(ids, np.log(p)), PIECES.__getitem__, [0, 15])
    assert sorted(candidates.ids.tolist()) == kept_ids


def test_infill_without_an_end_keeps_unlikely_texts():
    ids = np.arange(4, 14)
    candidates = infill(Candidates(ids, np.zeros(10)), PIECES.__getitem__, [])
    assert sorted(candidates.ids.tolist()) == ids.tolist()


def test_names_of_samplers():
    assert [canonical_name(n) for n in ("top-k", "TopP", "typ", "nucleus", "temp", "tfs-z")] == [
        "top_k", "top_p", "typ_p", "top_p", "temperature", "tfs_z",
    ]  # fmt: skip
    assert Sampling(samplers="temp; top-k; infill").order == ("temperature", "top_k", "infill")
    with pytest.raises(InputError, match="no sampler 'top_q'; there are penalties, dry"):
        Sampling(samplers="top_q").check_sampling()


def test_defaults_are_llama_cpps():
    """common_params_sampling in common/common.h; tfs is 1, off, as it was until it was removed."""
    got = Sampling()
    expected = {
        "temp": 0.8, "dynatemp_range": 0, "dynatemp_exp": 1, "top_k": 40, "top_p": 0.95, "min_p": 0.05,
        "top_n_sigma": -1, "typical": 1, "xtc_probability": 0, "xtc_threshold": 0.1, "repeat_penalty": 1,
        "frequency_penalty": 0, "presence_penalty": 0, "repeat_last_n": 64, "dry_multiplier": 0, "dry_base": 1.75,
        "dry_allowed_length": 2, "dry_penalty_last_n": 64, "mirostat": 0, "mirostat_lr": 0.1, "mirostat_ent": 5,
        "logit_bias": (), "dry_sequence_breaker": (), "tfs": 1,
    }  # fmt: skip
    assert {name: getattr(got, name) for name in expected} == expected
    assert {*expected, "samplers"} == set(Sampling.__dataclass_fields__)
    assert got.breakers == ("\n", ":", '"', "*")
    expected_order = [
        "penalties",
        "dry",
        "top_n_sigma",
        "top_k",
        "typ_p",
        "top_p",
        "min_p",
        "xtc",
        "temperature",
    ]
    assert [name for name in got.order if name != "tfs_z"] == expected_order
    assert (
        got.order == SAMPLER_ORDER
        and SAMPLER_ORDER.index("tfs_z") == SAMPLER_ORDER.index("top_k") + 1
    )


def by_hand(logits, recent, s: Sampling) -> np.ndarray:
    """Probabilities of the tokens: penalties, top-k, typical, top-p, min-p, temperature, token by token."""
    x = {i: float(v) for i, v in enumerate(logits)}
    tail = recent[-s.repeat_last_n :]
    for i in set(tail):
        x[i] = x[i] / s.repeat_penalty if x[i] > 0 else x[i] * s.repeat_penalty
        x[i] -= tail.count(i) * s.frequency_penalty + s.presence_penalty
    first = sorted(x, key=lambda i: (-x[i], i))[: s.top_k]

    def likely(ids):
        total = sum(math.exp(x[i]) for i in ids)
        return {i: math.exp(x[i]) / total for i in ids}

    def until(ids, p, enough):
        survivors, total = [], 0.0
        for i in ids:
            survivors.append(i)
            total += p[i]
            if enough(total):
                break
        return survivors

    p = likely(first)
    h = -sum(v * math.log(v) for v in p.values())
    typical_order = sorted(first, key=lambda i: abs(-math.log(p[i]) - h))
    survivors = until(typical_order, p, lambda t: t > s.typical)
    p = likely(survivors)
    survivors = until(sorted(survivors, key=lambda i: -p[i]), p, lambda t: t >= s.top_p)
    p = likely(survivors)
    survivors = [i for i in survivors if p[i] >= s.min_p * max(p.values())]
    total = sum(math.exp(x[i] / s.temp) for i in survivors)
    return np.array(
        [math.exp(x[i] / s.temp) / total if i in survivors else 0.0 for i in range(len(x))]
    )


def test_a_whole_chain_draws_what_the_formulas_say():
    rng, count = np.random.default_rng(7), 4000
    for temp, p in ((0.7, 0.8), (1.6, 0.95)):
        logits = (rng.standard_normal(30) * 2).astype(np.float32)
        recent = rng.integers(0, 30, 40).tolist()
        s = Sampling(
            temp=temp, top_k=20, top_p=p, min_p=0.03, typical=0.9, repeat_penalty=1.2,
            frequency_penalty=0.1, presence_penalty=0.2, repeat_last_n=16,
        )  # fmt: skip
        expected = by_hand(logits, recent, s)
        chain, seen = Chain(s, 11, recent), np.zeros(30)
        for index in range(count):
            chain.index = index
            seen[chain.choose(logits)] += 1
        error = np.sqrt(expected * (1 - expected) / count)
        assert (np.abs(seen / count - expected) <= 4 * error).all()


def test_a_copy_goes_its_own_way():
    logits = np.random.default_rng(0).standard_normal(50).astype(np.float32)
    chain = Chain(Sampling(mirostat=2, temp=1.0), 4, [1, 2])
    chain.accept(chain.choose(logits))
    clone = chain.copy()
    state = (chain.recent.copy(), chain.mu, chain.index)
    ids = []
    for _ in range(5):
        ids.append(clone.choose(logits))
        clone.accept(ids[-1])
    assert (chain.recent, chain.mu, chain.index) == state != (clone.recent, clone.mu, clone.index)
    for id in ids:
        assert chain.choose(logits) == id
        chain.accept(id)


class TwoTokenConstraint:
    """Lets 3 and 8 come, as often as asked."""

    def __init__(self, left: int) -> None:
        self.left = left

    @property
    def over(self) -> bool:
        return not self.left

    def allowed(self, size: int) -> np.ndarray:
        return np.isin(np.arange(size), [3, 8])

    def accept(self, id: int) -> None:
        assert id in (3, 8)
        self.left -= 1

    def copy(self) -> "TwoTokenConstraint":
        return TwoTokenConstraint(self.left)


def test_only_allowed_tokens_come():
    logits = np.arange(100, dtype=np.float32)
    assert Chain(Sampling(temp=0), constraint=TwoTokenConstraint(1)).choose(logits) == 8
    wide = Sampling(temp=50, min_p=0, top_p=1)
    got = {Chain(wide, i, constraint=TwoTokenConstraint(1)).choose(logits) for i in range(50)}
    assert got == {3, 8}
    chain = Chain(wide, constraint=TwoTokenConstraint(2))
    clone = chain.copy()
    for _ in range(2):
        assert not chain.over
        chain.accept(chain.choose(logits))
    assert chain.over and not clone.over


def test_a_chain_without_temperature_or_limits_draws_from_all():
    chain = Chain(replace(Sampling(), samplers=""), 0)
    seen = np.zeros(4)
    for index in range(2000):
        chain.index = index
        seen[chain.choose(np.log(FOUR).astype(np.float32))] += 1
    assert np.abs(seen / 2000 - FOUR).max() < 0.05
