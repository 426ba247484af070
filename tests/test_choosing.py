"""The samplers of the graph choose what those of the host choose."""

import numpy as np
import pytest

import packtrain as pt
from packtrain import kernels
from packtrain.dtypes import f64, i64
from packtrain.engine import ops
from packtrain.inference.sampling import Candidates, Chain, Sampling, token_rng

ROWS, VOCAB, K = 64, 500, 64


@pytest.fixture(scope="module")
def chosen():
    """A function of logits, numbers and counts, on a plan made once: ids and logits of candidates, and tokens."""
    x = pt.input("x", (ROWS, VOCAB))
    numbers, counts = pt.input("numbers", (ROWS, 3), f64), pt.input("counts", (ROWS, 3), i64)
    ids, values = ops.candidates(x, k=K)
    outputs = {"ids": ids, "values": values, "y": ops.draw(ids, values, numbers, counts)}
    placed = pt.place(pt.Graph(outputs))
    run = pt.Session().executor(placed, pt.make_plan(placed))
    return lambda x, numbers, counts: run({"x": x, "numbers": numbers, "counts": counts})


def settings(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.stack(
        [
            rng.choice([0, 0.01, 0.8, 1, 3], ROWS),
            rng.choice([0, 0.3, 0.95, 1], ROWS),
            rng.choice([0, 0.05, 0.5, 1], ROWS),
        ],
        1,
    )
    counts = np.stack(
        [
            rng.integers(1, K + 1, ROWS),
            rng.integers(0, 2**63 - 1, ROWS),
            rng.integers(0, 10**6, ROWS),
        ],
        1,
    )
    return numbers.astype(float), counts


def chains(numbers: np.ndarray, counts: np.ndarray) -> list[Chain]:
    sampler_chains = []
    for (temp, p, share), (k, seed, index) in zip(numbers.tolist(), counts.tolist(), strict=True):
        sampler_chains.append(Chain(Sampling(temp=temp, top_p=p, min_p=share, top_k=k), seed))
        sampler_chains[-1].index = index
    return sampler_chains


def test_the_graph_chooses_what_the_host_chooses(chosen):
    rng, seen = np.random.default_rng(0), set()
    for round in range(60):
        x = rng.standard_normal((ROWS, VOCAB)).astype(np.float32) * rng.choice([0.1, 2, 10])
        if round % 3 == 0:  # ties
            x = np.round(x)
        numbers, counts = settings(rng)
        got = chosen(x, numbers, counts)["y"]
        assert got.tolist() == [
            c.choose(row) for c, row in zip(chains(numbers, counts), x, strict=True)
        ]
        seen.update(got.tolist())
    assert len(seen) > VOCAB // 2


def test_temperature_0_is_the_first_of_the_largest(chosen):
    x = np.round(np.random.default_rng(1).standard_normal((ROWS, VOCAB))).astype(np.float32)
    numbers, counts = np.tile([0.0, 1.0, 0.0], (ROWS, 1)), np.tile([0, 5, 7], (ROWS, 1))
    assert chosen(x, numbers, counts)["y"].tolist() == x.argmax(1).tolist()


def test_the_host_finishes_what_the_graph_filtered(chosen):
    rng = np.random.default_rng(2)
    x = rng.standard_normal((ROWS, VOCAB)).astype(np.float32)
    numbers, counts = settings(rng)
    got = chosen(x, numbers, counts)
    options = {
        "samplers": "top_k;typ_p;xtc;temperature",
        "typical": 0.9,
        "xtc_probability": 0.5,
        "top_k": 40,
    }
    for row in range(ROWS):
        pair = [Chain(Sampling(**options), 3) for _ in range(2)]
        candidates = Candidates(
            got["ids"][row].astype(np.int64), got["values"][row].astype(float), True
        )
        assert pair[0].choose(candidates) == pair[1].choose(x[row])


def test_numbers_are_numpys(chosen):
    """A row of equal logits shows the uniform number itself."""
    rng = np.random.default_rng(3)
    _, counts = settings(rng)
    counts[:, 0] = K
    counts[:3, 1:] = [[0, 0], [2**63 - 1, 0], [1, 2**62]]
    got = chosen(np.zeros((ROWS, VOCAB), np.float32), np.tile([1.0, 1.0, 0.0], (ROWS, 1)), counts)[
        "y"
    ]
    assert got.tolist() == [
        int(token_rng(seed, index).random() * K) for _, seed, index in counts.tolist()
    ]


@pytest.mark.parametrize("kind", ["random", "ties", "rising", "not finite", "all alike"])
def test_candidates_of_long_rows_are_those_of_a_sort(kind):
    """Rows in which few values are looked at; rising ones and equal ones have too many for that."""
    rng, sizes = np.random.default_rng(4), ((2, 32_003, 128), (1, 4096, 128), (3, 2000, 5))
    for n, v, k in sizes:
        x = rng.standard_normal((n, v)).astype(np.float32)
        if kind == "ties":
            x = np.round(3 * x)
        elif kind == "rising":
            x.sort(axis=1)
        elif kind == "not finite":
            x[:, rng.integers(0, v, 60)] = np.tile(np.float32([np.nan, np.inf, -np.inf]), 20)
        elif kind == "all alike":
            x[...] = -3
        ids, values = np.empty((n, k), np.int32), np.empty((n, k), np.float32)
        kernels.choosing.candidates(ids, values, x)
        seen = np.where(np.isfinite(x), x, np.float32(np.inf))
        order = np.argsort(-seen, axis=1, kind="stable")[:, :k]
        assert np.array_equal(ids, order)
        assert np.array_equal(values, np.take_along_axis(seen, order, 1))
