"""Losses of pairs of answers to the same prompt, the chosen and the rejected one: DPO and its relatives.

One loss with settings. With s an answer's log-probability, counted by `measure`, and r that of the reference model
(the weights before training; 0 without `reference`), the loss of a pair is

    z = beta * ((s - r)_chosen - (s - r)_rejected) - gamma
    loss = by * judge(z) + nll * (negative log-likelihood of the chosen answer, mean of its tokens)

Losses by token come from the chunked head. A frozen head computes logits once, because its gradient per row times the
preference's slope is exact; a trained head computes them again.
Sources: DPO, Rafailov et al. 2023, arXiv 2305.18290; label smoothing, Mitchell 2023; IPO, Azar et al. 2023,
arXiv 2310.12036; `nll` beside DPO (RPO), Pang et al. 2024, arXiv 2404.19733; SimPO, Meng et al. 2024, arXiv 2405.14734;
ORPO, Hong et al. 2024, arXiv 2403.07691. Names and defaults are those of TRL."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from packtrain.engine import ops
from packtrain.engine.tensor import Tensor, input, named

SIDES_INPUT, REFERENCE, PAIRS, SHARES = "sides", "reference", "pairs", "shares"  # inputs
MIN_COMPLEMENT = 1e-6  # least 1 - p under the logarithm of odds


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """Settings of a preference loss."""

    name: str
    beta: float = 0.1
    # sum or mean of the log-probabilities of an answer's tokens; odds: log(p / (1 - p)) of the mean
    measure: str = "sum"
    # sigmoid: -log sigmoid(z), with smoothing; square: (margin - 1 / (2 beta))², with the margin before beta
    judge: str = "sigmoid"
    reference: bool = True  # whether the reference model's log-probabilities are subtracted
    gamma: float = 0.0
    smoothing: float = 0.0  # share of pairs expected to have chosen and rejected answers swapped
    by: float = 1.0
    nll: float = 0.0

    @property
    def uses_mean(self) -> bool:
        """Whether log-probabilities are means of an answer's tokens."""
        return self.measure != "sum"

    @property
    def needs_shares(self) -> bool:
        """Whether the loss needs the mean of a chosen answer's log-probabilities beside their sum."""
        return self.nll > 0 and not self.uses_mean

    # ---- in the graph

    def loss(self, losses: Tensor, num_pairs: int) -> tuple[Tensor, Tensor]:
        """Compute (loss (), log-probabilities (B, 2P)) from losses by token (B, T); rows have P chosen answers, then P
        rejected ones.

        Adds inputs: token weights `sides` (B, 2P, T), `pairs` (B, P); if needed `reference` (B, 2P), `shares` (B, P).
        """
        rows, num_tokens = losses.shape
        answer_sides = input(SIDES_INPUT, (rows, 2 * num_pairs, num_tokens))
        summed = ops.matmul(ops.reshape(losses, shape=(rows, 1, num_tokens)), answer_sides)
        logps = named("logps", ops.scale(ops.reshape(summed, shape=(rows, 2 * num_pairs)), by=-1.0))
        answer_scores = logps
        if self.measure == "odds":  # log(p / (1 - p)), from log p
            complement = ops.scale(ops.exp(logps), by=-1.0, bias=1.0)
            answer_scores = ops.sub(logps, ops.log(ops.clamp(complement, low=MIN_COMPLEMENT)))
        if self.reference:
            answer_scores = ops.sub(answer_scores, input(REFERENCE, answer_scores.shape))
        chosen_scores, rejected = (
            ops.narrow(answer_scores, axis=1, start=at, length=num_pairs) for at in (0, num_pairs)
        )
        pair_losses = ops.scale(self._judge_margin(ops.sub(chosen_scores, rejected)), by=self.by)
        if self.nll:
            likely = ops.narrow(logps, axis=1, start=0, length=num_pairs)
            likely = ops.mul(likely, input(SHARES, likely.shape)) if self.needs_shares else likely
            pair_losses = ops.sub(pair_losses, ops.scale(likely, by=self.nll))
        return named("loss", ops.sum(ops.mul(pair_losses, input(PAIRS, (rows, num_pairs))))), logps

    def _judge_margin(self, margin: Tensor) -> Tensor:
        """Compute each pair's judge(z) (B, P) from the margins (B, P), which are chosen minus rejected scores."""
        if self.judge == "square":
            return ops.sqr(ops.scale(margin, by=1.0, bias=-1 / (2 * self.beta)))
        z = ops.scale(margin, by=self.beta, bias=-self.gamma)
        right = ops.softplus(ops.scale(z, by=-1.0))
        if not self.smoothing:
            return right
        wrong = ops.softplus(z)
        return ops.add(ops.scale(right, by=1 - self.smoothing), ops.scale(wrong, by=self.smoothing))

    # ---- on the host

    def loss_and_rewards(
        self, logps: np.ndarray, reference: np.ndarray, token_shares: np.ndarray | float = 1.0
    ) -> dict[str, np.ndarray]:
        """Compute for each pair, in f64 with NumPy: `loss`, and the rewards `chosen` and `rejected`, which are beta *
        (an answer's log-probability - the reference model's).

        logps         (N, 2)  log-probabilities as the graph counts them, chosen first; `reference` likewise
        token_shares  (N,)    1 / tokens of the chosen answer, if log-probabilities are sums
        """
        s = logps.astype(np.float64)
        answer_scores = (
            s - np.log(np.maximum(-np.expm1(s), MIN_COMPLEMENT)) if self.measure == "odds" else s
        )
        rewards = answer_scores - (reference if self.reference else 0.0)
        reward_margin = rewards[:, 0] - rewards[:, 1]
        if self.judge == "square":
            pair_losses = np.square(reward_margin - 1 / (2 * self.beta))
        else:
            z = self.beta * reward_margin - self.gamma
            right_loss, wrong_loss = np.logaddexp(0, -z), np.logaddexp(0, z)
            pair_losses = (1 - self.smoothing) * right_loss + self.smoothing * wrong_loss
        losses = self.by * pair_losses - self.nll * s[:, 0] * token_shares
        chosen, rejected = self.beta * rewards[:, 0], self.beta * rewards[:, 1]
        return {"loss": losses, "chosen": chosen, "rejected": rejected}


KINDS = {
    loss.name: loss
    for loss in (
        PreferenceLoss("dpo"),
        PreferenceLoss("ipo", measure="mean", judge="square"),
        PreferenceLoss("simpo", beta=2.0, measure="mean", reference=False, gamma=0.5),
        PreferenceLoss("orpo", beta=1.0, measure="odds", reference=False, by=0.1, nll=1.0),
    )
}


def make_preference(name: str, **settings: Any) -> PreferenceLoss:
    """Return the loss `name`, a key of KINDS, with `settings`, fields of PreferenceLoss; None keeps its default."""
    return replace(KINDS[name], **{k: value for k, value in settings.items() if value is not None})
