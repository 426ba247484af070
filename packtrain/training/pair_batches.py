"""Batches of pairs of answers, for the losses of `models.preference_loss`.

The samples 2i and 2i + 1 are the chosen and the rejected answer of pair i; a row holds whole pairs."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from packtrain.data.conversations import TokenizedSamples
from packtrain.models.preference_loss import PAIRS, REFERENCE, SHARES, SIDES_INPUT, PreferenceLoss
from packtrain.training.sample_batches import SampleBatches

TIE_MARGIN = 1e-5


class PairBatches(SampleBatches):
    """SampleBatches of answer pairs, whose batches also have inputs for a preference loss.

    sides      (rows, 2P, time)  f32, which targets are the answers': P chosen ones, then P rejected; divided by their
                                 number where the loss wants means
    reference  (rows, 2P)        f32, their log-probabilities by the reference model, from `known_logps`
    shares     (rows, P)         f32, 1 / targets of the chosen answer, where the loss counts its sum and its mean
    pairs      (rows, P)         f32, 1 for each pair
    P is the most pairs of a row.

    known_logps  (samples,)      f64, log-probabilities by the reference model, NaN where not computed yet
    """

    def __init__(
        self, samples: TokenizedSamples, rows: int, time: int, loss_settings: PreferenceLoss,
        **order: Any,
    ) -> None:  # fmt: skip
        super().__init__(samples, rows, time, **order)
        self.loss_settings, self.max_pairs = loss_settings, self.max_items
        self.known_logps = np.full(len(samples), np.nan)

    @staticmethod
    def item_lengths(samples: TokenizedSamples) -> np.ndarray:
        return np.asarray((samples.lengths - 1).reshape(-1, 2).sum(-1))

    def row_samples(self, index: int) -> list[list[int]]:
        return [[2 * i + side for i in row for side in (0, 1)] for row in self.row_items(index)]

    def _make_row(self, items: list[int]) -> dict[str, np.ndarray]:
        sample_ids = [2 * i + side for i in items for side in (0, 1)]
        row, num_pairs = super()._make_row(sample_ids), len(items)
        sides = np.zeros((2, self.max_pairs, self.time), np.float32)
        reference_logps = np.zeros((2, self.max_pairs), np.float32)
        shares = np.zeros(self.max_pairs, np.float32)
        for sample_number, sample in enumerate(sample_ids):
            pair, side = divmod(sample_number, 2)
            sides[side, pair] = side_weights = row["weights"] * (row["seq"] == sample_number)
            if self.loss_settings.uses_mean:
                sides[side, pair] /= side_weights.sum()
            reference_logps[side, pair] = self.known_logps[sample]
            if not side:
                shares[pair] = 1 / side_weights.sum()
        row[SIDES_INPUT] = sides.reshape(-1, self.time)
        row[PAIRS] = (np.arange(self.max_pairs) < num_pairs).astype(np.float32)
        if self.loss_settings.reference:
            row[REFERENCE] = reference_logps.reshape(-1)
        if self.loss_settings.needs_shares:
            row[SHARES] = shares
        return row


def answer_logps(losses: np.ndarray, batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return log-probabilities (rows, 2P) of answers, a row's chosen, then rejected, from losses (rows, time)."""
    return np.asarray(-(batch[SIDES_INPUT].astype(np.float64) * losses[:, None]).sum(-1))


def pair_logps(logps: np.ndarray, batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return (N, 2), chosen and rejected, of the batch's real pairs, from `logps` (rows, 2P) of answer_logps."""
    return np.asarray(logps.reshape(len(logps), 2, -1).transpose(0, 2, 1)[batch[PAIRS] > 0])


def pair_measures(
    preference: PreferenceLoss, logps: np.ndarray, batch: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return {`loss`, rewards `chosen`, `rejected`: (N,) over a batch's pairs} of answer_logps `logps` (rows, 2P)."""
    reference_logps = batch.get(REFERENCE, np.zeros_like(logps))
    shares = batch[SHARES][batch[PAIRS] > 0] if preference.needs_shares else 1.0
    return preference.loss_and_rewards(
        pair_logps(logps, batch), pair_logps(reference_logps, batch), shares
    )


def pair_summary(step_measures: Iterable[dict[str, np.ndarray]]) -> dict[str, float]:
    """Average pair_measures under TRL's names: rewards, their margin, and how often the chosen reward is higher."""
    measures = [*step_measures]
    chosen, rejected = (
        np.concatenate([p[side] for p in measures]) for side in ("chosen", "rejected")
    )
    return {
        "rewards_chosen": float(chosen.mean()), "rewards_rejected": float(rejected.mean()),
        "rewards_margin": float((chosen - rejected).mean()),
        "rewards_accuracy": float(chosen_wins(chosen - rejected).mean()),
    }  # fmt: skip


def chosen_wins(margins: np.ndarray) -> np.ndarray:
    """Return for each margin, chosen minus rejected reward: 1 above 0, 1/2 if 0 but for rounding, else 0."""
    return np.where(np.abs(margins) < TIE_MARGIN, 0.5, margins > 0)
