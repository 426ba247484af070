"""Batches: every token is a target once, masks and positions follow the documents, an index says everything."""

import itertools
from collections import Counter

import numpy as np
import pytest

from packtrain.data.text import DocumentTokens
from packtrain.training.text_batches import TextBatches

BOS, EOS = 1, 2
modes = pytest.mark.parametrize("fill", [True, False])


def tokens_of(*lengths: int) -> DocumentTokens:
    """Documents of so many tokens between BOS and EOS; every token has another id."""
    ids, starts = [], []
    for length in lengths:
        starts.append(len(ids))
        ids += [BOS, *range(10 + len(ids), 10 + len(ids) + length), EOS]
    return DocumentTokens(np.array(ids, np.uint16), np.array(starts, np.int64))


def as_lists(batch: dict[str, np.ndarray]) -> dict[str, list]:
    return {name: value.tolist() for name, value in batch.items()}


def target_pairs(batches: TextBatches, epoch: int = 0) -> Counter[tuple[int, int]]:
    """How often each pair of a token and its target counts in an epoch."""
    pair_counts: Counter[tuple[int, int]] = Counter()
    for index in range(epoch * len(batches), (epoch + 1) * len(batches)):
        batch = batches[index]
        counted = batch["weights"] == 1
        pair_counts.update(
            zip(batch["tokens"][counted].tolist(), batch["targets"][counted].tolist(), strict=True)
        )
    return pair_counts


def expected_pairs(tokens: DocumentTokens) -> Counter[tuple[int, int]]:
    pairs = zip(tokens.ids[:-1].tolist(), tokens.ids[1:].tolist(), strict=True)
    return Counter(pair for pair in pairs if pair != (EOS, BOS))


def test_a_filled_batch():
    batch = TextBatches(tokens_of(3, 1, 2), 2, 6, shuffle=False)[0]
    assert as_lists(batch) == {
        "tokens": [[1, 10, 11, 12, 2, 1], [15, 2, 1, 18, 19, 0]],
        "targets": [[10, 11, 12, 2, 1, 15], [2, 1, 18, 19, 2, 0]],
        "weights": [[1, 1, 1, 1, 0, 1], [1, 0, 1, 1, 1, 0]],
        "pos": [[0, 1, 2, 3, 4, 0], [0, 1, 0, 1, 2, 0]],
        "seq": [[0, 0, 0, 0, 0, 1], [0, 0, 1, 1, 1, 2]],
    }
    assert {name: value.dtype.name for name, value in batch.items()} == {
        "tokens": "int32", "targets": "int32", "weights": "float32", "pos": "int32", "seq": "int32",
    }  # fmt: skip


def test_a_batch_of_documents():
    batches = TextBatches(tokens_of(3, 1), 4, 3, shuffle=False, fill=False)
    assert len(batches) == 1
    assert as_lists(batches[0]) == {
        "tokens": [[1, 10, 11], [12, 0, 0], [1, 15, 0], [0, 0, 0]],
        "targets": [[10, 11, 12], [2, 0, 0], [15, 2, 0], [0, 0, 0]],
        "weights": [[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]],
        "pos": [[0, 1, 2], [0, 0, 1], [0, 1, 0], [0, 1, 2]],
        "seq": [[0, 0, 0], [0, 1, 1], [0, 0, 1], [0, 0, 0]],
    }


@modes
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("time", [1, 2, 5, 16, 1000])
@pytest.mark.parametrize("rows", [1, 3])
def test_every_token_is_a_target_once(rows: int, time: int, shuffle: bool, fill: bool):
    tokens = tokens_of(7, 1, 30, 2, 2, 14)
    batches = TextBatches(tokens, rows, time, shuffle=shuffle, random_offsets=False, fill=fill)
    assert target_pairs(batches) == expected_pairs(tokens)
    assert target_pairs(batches, epoch=3) == expected_pairs(tokens)


@pytest.mark.parametrize("time", [3, 16])
def test_random_offsets_leave_out_at_most_one_target(time: int):
    tokens = tokens_of(7, 1, 30, 2, 2, 14)
    batches = TextBatches(tokens, 2, time, seed=5)
    first_missing = set()
    for epoch in range(20):
        missing = expected_pairs(tokens) - target_pairs(batches, epoch)
        assert missing.total() <= 1 and not target_pairs(batches, epoch) - expected_pairs(tokens)
        first_missing.add(min(Counter(missing), default=None))
    assert len(first_missing) > 5  # other places in other epochs


def followers(batches: TextBatches, epoch: int) -> set[tuple[int, int]]:
    """Last token of a document and first token of the next one in its window."""
    pairs = set()
    for index in range(epoch * len(batches), (epoch + 1) * len(batches)):
        batch = batches[index]
        for tokens, seq in zip(batch["tokens"], batch["seq"], strict=True):
            for at in np.flatnonzero(np.diff(seq)):
                if tokens[at] == EOS and 0 < at < len(tokens) - 2 and tokens[at + 2]:
                    pairs.add((int(tokens[at - 1]), int(tokens[at + 2])))
    return pairs


@pytest.mark.parametrize("random_offsets", [True, False])
@pytest.mark.parametrize("count", [1, 2, 15, 16, 33, 100])
def test_shuffled_documents_have_other_neighbours_in_each_epoch(count: int, random_offsets: bool):
    tokens = tokens_of(*np.random.default_rng(count).integers(1, 12, count))
    options = {"seed": 5, "random_offsets": random_offsets}
    batches = TextBatches(tokens, 2, 40, shuffle_samples=True, **options)
    assert len(batches) == len(TextBatches(tokens, 2, 40, **options))
    for epoch in range(4):
        missing = expected_pairs(tokens) - target_pairs(batches, epoch)
        assert missing.total() <= random_offsets
        assert not target_pairs(batches, epoch) - expected_pairs(tokens)
    if count >= 15:
        pairs = [followers(batches, epoch) for epoch in range(6)]
        for now, following in itertools.pairwise(pairs):
            assert len(now & following) < len(now) / 3


def test_runs_that_began_without_shuffled_documents_keep_their_order():
    """Recorded from packtrain 0.2.0."""
    batches = TextBatches(tokens_of(3, 5, 1, 2), 1, 8, seed=5)
    rows = [batches[index]["tokens"][0].tolist() for index in range(4)]
    assert rows == [
        [22, 2, 0, 0, 0, 0, 0, 0],
        [25, 26, 2, 1, 10, 11, 12, 2],
        [1, 15, 16, 17, 18, 19, 2, 1],
        [2, 1, 15, 16, 17, 18, 19, 2],
    ]


@pytest.mark.parametrize("shuffle_samples", [True, False])
def test_an_index_says_everything(shuffle_samples: bool):
    tokens = tokens_of(*range(1, 30))
    options = {"seed": 7, "shuffle_samples": shuffle_samples}
    batches = TextBatches(tokens, 2, 8, **options)
    order = [*range(3 * len(batches))]
    expected = [as_lists(batches[i]) for i in order]
    reordered = {i: as_lists(TextBatches(tokens, 2, 8, **options)[i]) for i in reversed(order)}
    assert all(expected[i] == reordered[i] for i in order)
    for i in (40, 2, 70, 2):
        assert as_lists(batches[i]) == expected[i]
    assert as_lists(TextBatches(tokens, 2, 8, seed=8)[0]) != expected[0]
    assert expected[0] != expected[len(batches)]


def test_an_unshuffled_epoch_is_like_every_other():
    batches = TextBatches(tokens_of(5, 9, 2), 2, 4, shuffle=False, seed=9)
    assert as_lists(batches[1]) == as_lists(batches[1 + 4 * len(batches)])


def test_a_shuffled_epoch_has_the_windows_of_an_unshuffled_one():
    tokens = tokens_of(*range(1, 30))
    unshuffled = TextBatches(tokens, 1, 8, shuffle=False)
    shuffled = TextBatches(tokens, 1, 8, random_offsets=False)
    rows = [
        [batches[i]["tokens"].tolist() for i in range(len(batches))]
        for batches in (unshuffled, shuffled)
    ]
    assert rows[0] != rows[1] and sorted(rows[0]) == sorted(rows[1])


@modes
def test_a_text_shorter_than_a_window_is_one_padded_window(fill: bool):
    batches = TextBatches(tokens_of(2), 1, 8, fill=fill, random_offsets=False)
    assert len(batches) == 1
    assert batches[0]["weights"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]]


@modes
def test_positions_and_documents_within_rows(fill: bool):
    tokens = tokens_of(3, 40, 1, 5, 9, 2)
    batches = TextBatches(tokens, 3, 10, fill=fill, seed=1)
    for index in range(2 * len(batches)):
        batch = batches[index]
        for pos, seq, ids in zip(batch["pos"], batch["seq"], batch["tokens"], strict=True):
            assert pos[0] == seq[0] == 0
            new = np.diff(seq) == 1
            assert (np.diff(seq)[~new] == 0).all() and (np.diff(pos)[~new] == 1).all()
            assert (pos[1:][new] == 0).all()
            assert (new >= (ids[1:] == BOS)).all()


def test_what_is_padding_changes_nothing_else():
    """A row's own tokens come before its padding, which is a document of its own."""
    batch = TextBatches(tokens_of(3), 1, 9, shuffle=False)[0]
    is_own_token = batch["weights"][0] == 1
    assert is_own_token.tolist() == [True] * 4 + [False] * 5
    assert not set(batch["seq"][0][is_own_token]) & set(batch["seq"][0][~is_own_token])


def test_negative_seeds_and_wide_ids():
    tokens = tokens_of(5, 5)
    wide = DocumentTokens(tokens.ids.astype(np.uint32) + 70_000, tokens.starts)
    batch = TextBatches(wide, 1, 4, seed=-3)[0]
    assert batch["tokens"][batch["weights"] > 0].min() >= 70_000
    assert batch["tokens"].dtype == np.int32
