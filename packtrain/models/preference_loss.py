"""Losses of pairs of answers to the same prompt, the chosen and the rejected one: DPO and its relatives.

One loss with settings. With s an answer's log-probability, of which `measure` says how it is counted, and r the same of
the reference model (the weights before training; 0 without `reference`), for a pair

    z = beta * ((s - r)_chosen - (s - r)_rejected) - gamma
    loss = by * judge(z) + nll * (negative log-likelihood of the chosen answer, mean of its tokens)

Sources: DPO, Rafailov et al. 2023, arXiv 2305.18290; label smoothing, Mitchell 2023; IPO, Azar et al. 2023,
arXiv 2310.12036; `nll` beside DPO (RPO), Pang et al. 2024, arXiv 2404.19733; SimPO, Meng et al. 2024, arXiv 2405.14734;
ORPO, Hong et al. 2024, arXiv 2403.07691. Names and defaults are those of TRL.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from packtrain.engine import ops
from packtrain.engine.tensor import Tensor, input, named

SIDES, REFERENCE, PAIRS, SHARES = "sides", "reference", "pairs", "shares"  # inputs
LEAST = 1e-6  # of 1 - p, under the logarithm of odds


@dataclass(frozen=True, slots=True)
class Preference:
    """The settings of the loss.

    measure    sum: of the log-probabilities of an answer's tokens; mean; odds: log(p / (1 - p)) of the mean
    judge      sigmoid: -log sigmoid(z), with smoothing; square: (s' - 1 / (2 beta))² of the margin without beta
    reference  whether the reference model's log-probabilities are subtracted
    smoothing  the share of pairs expected to be the wrong way round
    """

    name: str
    beta: float = 0.1
    measure: str = "sum"
    judge: str = "sigmoid"
    reference: bool = True
    gamma: float = 0.0
    smoothing: float = 0.0
    by: float = 1.0
    nll: float = 0.0

    @property
    def divides(self) -> bool:
        """Whether log-probabilities are means of an answer's tokens."""
        return self.measure != "sum"

    @property
    def shares(self) -> bool:
        """Whether the log-probability of a chosen answer, a sum, is also needed as the mean of its tokens."""
        return self.nll > 0 and not self.divides

    # ---- in the graph

    def loss(self, losses: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
        """The loss () of losses by token (B, T), and log-probabilities (B, 2 `pairs`): chosen ones, then rejected.

        Adds the inputs of `PairBatches`: `sides` (B, 2P, T), `reference` (B, 2P), `shares` (B, P), and `pairs` (B, P),
        their weights.
        """
        rows, time = losses.shape
        sides = input(SIDES, (rows, 2 * pairs, time))
        summed = ops.matmul(ops.reshape(losses, shape=(rows, 1, time)), sides)
        logps = named("logps", ops.scale(ops.reshape(summed, shape=(rows, 2 * pairs)), by=-1.0))
        counted = _log_odds(logps) if self.measure == "odds" else logps
        if self.reference:
            counted = ops.sub(counted, input(REFERENCE, counted.shape))
        chosen, rejected = (
            ops.narrow(counted, axis=1, start=at, length=pairs) for at in (0, pairs)
        )
        each = ops.scale(self._judged(ops.sub(chosen, rejected)), by=self.by)
        if self.nll:
            likely = ops.narrow(logps, axis=1, start=0, length=pairs)
            likely = ops.mul(likely, input(SHARES, likely.shape)) if self.shares else likely
            each = ops.sub(each, ops.scale(likely, by=self.nll))
        return named("loss", ops.sum(ops.mul(each, input(PAIRS, (rows, pairs))))), logps

    def _judged(self, margin: Tensor) -> Tensor:
        if self.judge == "square":
            return ops.sqr(ops.scale(margin, by=1.0, bias=-1 / (2 * self.beta)))
        z = ops.scale(margin, by=self.beta, bias=-self.gamma)
        right = ops.softplus(ops.scale(z, by=-1.0))
        if not self.smoothing:
            return right
        wrong = ops.softplus(z)
        return ops.add(ops.scale(right, by=1 - self.smoothing), ops.scale(wrong, by=self.smoothing))

    # ---- on the host

    def judged(
        self, logps: np.ndarray, reference: np.ndarray, shares: np.ndarray | float = 1.0
    ) -> dict[str, np.ndarray]:
        """What the graph computes, of log-probabilities (N, 2) as it counts them, in f64, for each pair.

        shares (N,): 1 / tokens of the chosen answer, where these are sums.
        loss; chosen and rejected, the rewards of the answers: beta * (s - r).
        """
        s = logps.astype(np.float64)
        counted = s - np.log(np.maximum(-np.expm1(s), LEAST)) if self.measure == "odds" else s
        rewards = counted - (reference if self.reference else 0.0)
        margin = rewards[:, 0] - rewards[:, 1]
        if self.judge == "square":
            each = np.square(margin - 1 / (2 * self.beta))
        else:
            z = self.beta * margin - self.gamma
            right, wrong = np.logaddexp(0, -z), np.logaddexp(0, z)
            each = (1 - self.smoothing) * right + self.smoothing * wrong
        losses = self.by * each - self.nll * s[:, 0] * shares
        return {
            "loss": losses,
            "chosen": self.beta * rewards[:, 0],
            "rejected": self.beta * rewards[:, 1],
        }


def _log_odds(logps: Tensor) -> Tensor:
    """log(p / (1 - p))."""
    rest = ops.scale(ops.exp(logps), by=-1.0, bias=1.0)
    return ops.sub(logps, ops.log(ops.clamp(rest, low=LEAST)))


KINDS = {
    one.name: one
    for one in (
        Preference("dpo"),
        Preference("ipo", measure="mean", judge="square"),
        Preference("simpo", beta=2.0, measure="mean", reference=False, gamma=0.5),
        Preference("orpo", beta=1.0, measure="odds", reference=False, by=0.1, nll=1.0),
    )
}


def preference(name: str, **settings: Any) -> Preference:
    """The loss of this name, with these settings; None leaves a setting as the loss has it."""
    return replace(
        KINDS[name], **{key: value for key, value in settings.items() if value is not None}
    )
