"""Batches of pairs of answers, for the losses of `models.preference_loss`.

The samples 2i and 2i + 1 are the chosen and the rejected answer of pair i; a row holds whole pairs.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from packtrain.data.conversations import Samples
from packtrain.models.preference_loss import PAIRS, REFERENCE, SHARES, SIDES, Preference
from packtrain.training.sample_batches import SampleBatches

TIE = 1e-5


class PairBatches(SampleBatches):
    """Like SampleBatches, of pairs; a batch has inputs for the loss in addition.

    sides      (rows, 2P, time)  f32, which targets are the answers': P chosen ones, then P rejected; divided by their
                                 number where the loss wants means
    reference  (rows, 2P)        f32, their log-probabilities by the reference model, from `known`
    shares     (rows, P)         f32, 1 / targets of the chosen answer, where the loss counts its sum and its mean
    pairs      (rows, P)         f32, 1 for each pair
    P is the most pairs of a row.

    known      (samples,)        f64, NaN where nothing is known yet
    """

    def __init__(
        self, samples: Samples, rows: int, time: int, how: Preference, *, seed: int = 0,
        shuffle: bool = True, pack: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(samples, rows, time, seed=seed, shuffle=shuffle, pack=pack)
        self.how, self.most = how, int(np.diff(self._first).max())
        self.known = np.full(len(samples), np.nan)

    @staticmethod
    def lengths_of(samples: Samples) -> np.ndarray:
        return np.asarray((samples.lengths - 1).reshape(-1, 2).sum(-1))

    def answers(self, index: int) -> list[list[int]]:
        return [[2 * i + side for i in row for side in (0, 1)] for row in self.chosen(index)]

    def _row(self, chosen: list[int]) -> dict[str, np.ndarray]:
        sides_of = [2 * i + side for i in chosen for side in (0, 1)]
        row, count = super()._row(sides_of), len(chosen)
        sides = np.zeros((2, self.most, self.time), np.float32)
        reference_logps = np.zeros((2, self.most), np.float32)
        shares = np.zeros(self.most, np.float32)
        for number, sample in enumerate(sides_of):
            pair, side = divmod(number, 2)
            sides[side, pair] = side_weights = row["weights"] * (row["seq"] == number)
            if self.how.divides:
                sides[side, pair] /= side_weights.sum()
            reference_logps[side, pair] = self.known[sample]
            if not side:
                shares[pair] = 1 / side_weights.sum()
        row[SIDES] = sides.reshape(-1, self.time)
        row[PAIRS] = (np.arange(self.most) < count).astype(np.float32)
        if self.how.reference:
            row[REFERENCE] = reference_logps.reshape(-1)
        if self.how.shares:
            row[SHARES] = shares
        return row


def logps_of(losses: np.ndarray, batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """Log-probabilities (rows, 2P) of the answers of a batch, from the losses (rows, time) of its targets."""
    products = batch[SIDES].astype(np.float64) * losses[:, None]
    return np.asarray(-products.sum(-1))


def pairs_of(logps: np.ndarray, batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """The pairs (N, 2) among the log-probabilities of a batch."""
    by_pair = logps.reshape(len(logps), 2, -1).transpose(0, 2, 1)
    return np.asarray(by_pair[batch[PAIRS] > 0])


def measured(
    preference: Preference, logps: np.ndarray, batch: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Preference.judged for the pairs of a batch."""
    reference_logps = batch.get(REFERENCE, np.zeros_like(logps))
    shares = batch[SHARES][batch[PAIRS] > 0] if preference.shares else 1.0
    return preference.judged(pairs_of(logps, batch), pairs_of(reference_logps, batch), shares)


def summary(parts: Iterable[dict[str, np.ndarray]]) -> dict[str, float]:
    """Means over pairs, under TRL's names: rewards of both, their margin, and how often the chosen one's is higher."""
    measures = [*parts]
    chosen, rejected = (
        np.concatenate([p[side] for p in measures]) for side in ("chosen", "rejected")
    )
    return {
        "rewards_chosen": float(chosen.mean()),
        "rewards_rejected": float(rejected.mean()),
        "rewards_margin": float((chosen - rejected).mean()),
        "rewards_accuracy": float(right(chosen - rejected).mean()),
    }


def right(margins: np.ndarray) -> np.ndarray:
    """1 where the chosen answer's reward is higher, 1/2 where both are equal but for rounding."""
    return np.where(np.abs(margins) < TIE, 0.5, margins > 0)
