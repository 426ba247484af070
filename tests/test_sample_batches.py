"""Rows of samples: each is there once an epoch, alone in its attention; packed and unpacked learn the same."""

import itertools
from collections import Counter

import numpy as np
import pytest

from packtrain.data.conversations import TokenizedSamples
from packtrain.models.transformer import Config
from packtrain.training.sample_batches import SampleBatches, best_fit
from tests import models

modes = pytest.mark.parametrize("pack", [True, False])
shuffles = pytest.mark.parametrize("shuffle", [True, False])


def samples_of(*lengths: int, vocabulary: int = 1000) -> TokenizedSamples:
    """Samples of so many targets; about half of them are learnt, the last one always."""
    rng = np.random.default_rng(sum(lengths))
    ids = [rng.integers(1, vocabulary, n + 1, np.uint16) for n in lengths]
    weights = [np.append(rng.integers(0, 2, n), 1).astype(np.uint8) for n in lengths]
    starts = np.cumsum([0, *(n + 1 for n in lengths[:-1])])
    return TokenizedSamples(np.concatenate(ids), np.concatenate(weights), starts)


def count_batch_samples(
    batches: SampleBatches, epoch: int = 0
) -> Counter[tuple[tuple[int, ...], ...]]:
    """All samples of an epoch, read back from the rows: ids, targets and weights by sequence."""
    sample_counts: Counter[tuple[tuple[int, ...], ...]] = Counter()
    for index in range(epoch * len(batches), (epoch + 1) * len(batches)):
        batch = batches[index]
        for r in range(batches.rows):
            for number in np.unique(batch["seq"][r]):
                mask = batch["seq"][r] == number
                assert batch["pos"][r][mask].tolist() == list(range(int(mask.sum())))
                if batch["weights"][r][mask].any():
                    fields = (batch[name][r][mask] for name in ("tokens", "targets", "weights"))
                    sample_counts[tuple(tuple(values.tolist()) for values in fields)] += 1
    return sample_counts


def count_samples(samples: TokenizedSamples) -> Counter[tuple[tuple[int, ...], ...]]:
    every = (samples[i] for i in range(len(samples)))
    parts = (((ids[:-1]), (ids[1:]), (weights[1:])) for ids, weights in every)
    return Counter(tuple(tuple(values.tolist()) for values in part) for part in parts)


@modes
@shuffles
@pytest.mark.parametrize("rows", [1, 3])
def test_each_sample_is_there_once_an_epoch(pack: bool, shuffle: bool, rows: int):
    samples = samples_of(5, 1, 9, 3, 3, 10, 2, 7, 7, 1, 4)
    batches = SampleBatches(samples, rows, 10, seed=3, shuffle=shuffle, pack=pack)
    for epoch in range(3):
        assert count_batch_samples(batches, epoch) == count_samples(samples)
    assert sum(int(batches[i]["weights"].sum()) for i in range(len(batches))) == samples.targets


@modes
def test_an_index_says_everything(pack: bool):
    samples = samples_of(5, 1, 9, 3, 3, 10, 2, 7, 7, 1, 4)
    options = {"seed": 5, "pack": pack}
    expected = [SampleBatches(samples, 2, 12, **options)[i] for i in range(12)]
    batches = SampleBatches(samples, 2, 12, **options)
    for i in (11, 0, 7, 3, 7):
        assert models.same_bits(batches[i], expected[i])
    other = SampleBatches(samples, 2, 12, seed=6, pack=pack)
    assert any(not models.same_bits(other[i], expected[i]) for i in range(len(other)))
    epochs = [expected[i]["tokens"].tolist() for i in (0, len(batches))]
    assert epochs[0] != epochs[1]


def neighbours(batches: SampleBatches, epoch: int) -> set[tuple[int, int]]:
    """Pairs of samples that share a row in an epoch; each sample must be in one row."""
    indices = range(epoch * len(batches), (epoch + 1) * len(batches))
    rows = [items for index in indices for items in batches.row_items(index)]
    assert sorted(item for items in rows for item in items) == [*range(len(batches.samples))]
    assert all(rows[: batches.windows]) and not any(rows[batches.windows :])
    assert max(map(len, rows)) <= batches.max_items
    return {(a, b) for items in rows for a in items for b in items if a < b}


@pytest.mark.parametrize("max_length, time", [(60, 100), (90, 100), (100, 400)])
def test_shuffled_samples_have_other_neighbours_in_each_epoch(max_length: int, time: int):
    """Rows and their most samples are those of longest first, so that a plan holds for all epochs."""
    samples = samples_of(*np.random.default_rng(max_length).integers(5, max_length, 60))
    batches = SampleBatches(samples, 2, time, seed=3, shuffle_samples=True)
    packed_once = SampleBatches(samples, 2, time, seed=3)
    assert len(batches) == len(packed_once) and batches.max_items == packed_once.max_items
    for epoch in range(4):
        assert count_batch_samples(batches, epoch) == count_samples(samples)
    pairs = [neighbours(batches, epoch) for epoch in range(6)]
    for now, following in itertools.pairwise(pairs):
        assert len(now & following) < len(now) / 2
    batches.shuffle_key = 7
    assert neighbours(batches, 0) != pairs[0]


def test_shuffled_samples_are_a_function_of_the_index():
    samples = samples_of(*np.random.default_rng(0).integers(5, 60, 40))
    options = {"seed": 5, "shuffle_samples": True}
    expected = [SampleBatches(samples, 2, 100, **options)[i] for i in range(20)]
    batches = SampleBatches(samples, 2, 100, **options)
    for i in (19, 0, 11, 3, 11):
        assert models.same_bits(batches[i], expected[i])


@pytest.mark.parametrize("lengths", [(7, 6, 6, 5), (12, 12, 6, 6), (8, 8, 8, 4, 4, 4)])
def test_shuffled_samples_take_no_more_rows_where_only_longest_first_fits(lengths: tuple[int, ...]):
    batches = SampleBatches(samples_of(*lengths), 1, 12, shuffle_samples=True)
    assert batches.windows == sum(lengths) // 12
    for epoch in range(20):
        assert count_batch_samples(batches, epoch) == count_samples(batches.samples)


def test_runs_that_began_without_shuffled_samples_keep_their_order():
    """Recorded from packtrain 0.2.0."""
    batches = SampleBatches(samples_of(5, 1, 9, 3, 3, 10, 2, 7, 7, 1, 4), 2, 12, seed=5)
    rows = [batches.row_items(index) for index in range(6)]
    assert rows == [
        *([[7, 0], [8, 10, 9]], [[3, 1], [2, 4]], [[5, 6], []]),
        *([[3, 9], [7, 10, 1]], [[5, 6], [2, 4]], [[8, 0], []]),
    ]


def test_a_packed_row():
    samples = TokenizedSamples(
        np.array([1, 2, 3, 4, 5, 6, 7, 8, 9], np.uint16),
        np.array([0, 0, 1, 1, 0, 1, 0, 1, 1], np.uint8),
        np.array([0, 4, 6]),
    )
    batch = SampleBatches(samples, 1, 7, shuffle=False)[0]
    assert {name: values[0].tolist() for name, values in batch.items()} == {
        "tokens": [1, 2, 3, 7, 8, 5, 0],
        "targets": [2, 3, 4, 8, 9, 6, 0],
        "weights": [0, 1, 1, 1, 1, 1, 0],
        "pos": [0, 1, 2, 0, 1, 0, 0],
        "seq": [0, 0, 0, 1, 1, 2, 3],
    }
    assert {name: values.dtype.name for name, values in batch.items()} == {
        "tokens": "int32", "targets": "int32", "weights": "float32", "pos": "int32", "seq": "int32",
    }  # fmt: skip


def test_padding_takes_no_positions_that_samples_have_not():
    """A model may have learned so many positions as the longest sample has."""
    batch = SampleBatches(samples_of(3, 2), 1, 12, shuffle=False)[0]
    assert batch["pos"][0].tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 2, 0]
    assert batch["seq"][0].tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 4]


def test_samples_as_they_come():
    batches = SampleBatches(samples_of(3, 5, 4), 1, 5, shuffle=False, pack=False)
    assert [int((batches[i]["seq"] == 0).sum()) for i in range(3)] == [3, 5, 4]


def test_a_sample_that_does_not_fit():
    with pytest.raises(ValueError, match="6 targets does not fit a row of 5"):
        SampleBatches(samples_of(3, 6), 1, 5)


def test_rows_are_full():
    """Of many samples no more than a hundredth of the rows is lost; none is too full; sizes that fit exactly do."""
    lengths = np.sort(np.random.default_rng(0).gamma(2, 60, 5000).astype(int).clip(1, 512))[::-1]
    rows = best_fit(lengths, 512)
    filled = np.bincount(rows, lengths)
    assert filled.max() <= 512 and filled.sum() == lengths.sum()
    assert filled.mean() >= 0.99 * 512
    assert best_fit(np.array([7, 5, 5, 3, 2]), 10).tolist() == [0, 1, 1, 0, 2]


def test_packed_and_unpacked_learn_the_same():
    """Loss and all gradients of an epoch, as sums over its targets."""
    config = Config(64, 32, 16, 2, 24, 4, 2)
    samples = samples_of(9, 3, 12, 4, 7, 16, 2, 5, vocabulary=config.vocab_size)
    values, results = models.seeded_weights(config), []
    for pack in (True, False):
        batches = SampleBatches(samples, 2, 16, pack=pack)
        run = models.bind_graph(models.gradient_graph(config, 2, 16), values)
        sums: dict[str, np.ndarray] = {}
        for i in range(len(batches)):
            for name, value in run(batches[i]).items():
                if name != "losses":
                    sums[name] = sums.get(name, 0) + np.asarray(value, np.float64)
        results.append((len(batches), sums))
    (num_packed, packed), (num_unpacked, unpacked) = results
    assert num_packed < num_unpacked and packed.keys() == unpacked.keys()
    for name, value in unpacked.items():
        assert models.relative_error(packed[name], value) <= 1e-5, name
