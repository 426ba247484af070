"""Orders of an epoch: permutations, all equally likely, other ones for other keys."""

from collections import Counter
from itertools import pairwise

import pytest

from packtrain.training.epoch_order import item_at, round_keys


@pytest.mark.parametrize("count", [*range(1, 70), 255, 256, 257, 1000])
def test_an_order_is_a_permutation(count: int):
    for epoch in range(3):
        keys = round_keys(7, epoch)
        for salt in (0, 5):
            assert sorted(item_at(i, count, keys, salt) for i in range(count)) == list(range(count))


def test_every_permutation_comes_as_often():
    """Of three items in 6,000 epochs each of six orders; 30 is 99.999 % of chi-squared with 5 degrees of freedom."""
    counts = Counter(
        tuple(item_at(i, 3, round_keys(1, epoch)) for i in range(3)) for epoch in range(6_000)
    )
    assert len(counts) == 6
    assert sum((n - 1000) ** 2 / 1000 for n in counts.values()) < 30


@pytest.mark.parametrize("salt", [0, 9])
def test_every_place_takes_every_item_as_often(salt: int):
    """By chi-squared with 36 degrees of freedom, of which 90 is more than 99.9999 %."""
    for place in (0, 17, 36):
        counts = Counter(item_at(place, 37, round_keys(2, epoch), salt) for epoch in range(3_700))
        assert sum((counts[item] - 100) ** 2 / 100 for item in range(37)) < 90


def test_keys_epochs_and_salts_differ():
    epochs = [round_keys(seed, epoch) for seed in (0, 1, -1) for epoch in (0, 1)]
    orders = {
        tuple(item_at(i, 50, keys, salt) for i in range(50))
        for keys in epochs
        for salt in (0, 1, 2)
    }
    assert len(orders) == 18


def test_neighbours_part():
    """Items that follow each other are seldom neighbours: about 2 of 1,000."""
    keys = round_keys(3, 0)
    at = [item_at(i, 1_000, keys) for i in range(1_000)]
    assert sum(abs(a - b) == 1 for a, b in pairwise(at)) < 12
