"""The loss of replay: a tuned model stays near the base in texts that the base wrote.

With p the base's and q the tuned model's probabilities of the next token, and y the token that the base drew from p,

    loss = mean of -log q(target) over the data + weight * mean of sum p log(p / q) over the texts

The sum runs over the base's `top` likeliest tokens; where y is another one, it stands for all of these: on average over
y that is the whole divergence, and its gradient is 0 while q = p. As in models.distill, logits are computed once.
Robins 1995, Catastrophic forgetting, rehearsal and pseudorehearsal.
"""

from dataclasses import dataclass

import numpy as np

from packtrain import ops
from packtrain.dtypes import i32
from packtrain.models.config import Config
from packtrain.models.distill import beside
from packtrain.models.part import Weights
from packtrain.models.transformer import Loss
from packtrain.tensor import Tensor, input, named

IDS, PARTS, ENTROPY = "replay_ids", "replay_parts", "replay_entropy"  # inputs


@dataclass(frozen=True, slots=True)
class Replay:
    """The settings of the loss.

    length  tokens of a text at the end of every row
    weight  of the texts, where the data counts 1
    top     how many of the base's likeliest tokens are compared one by one
    """

    length: int
    weight: float
    top: int

    def numbers(self, time: int) -> int:
        """Of 4 bytes, in the inputs of a row."""
        return (2 * self.top + 3) * self.length

    def loss(self, config: Config, w: Weights, made: Loss, chunk: int) -> Tensor:
        """The loss (). Adds inputs IDS i32 and PARTS, (B, top + 1, length), and ENTROPY (B, length), see `targets`."""
        rows, time, _ = made.x.shape

        def last(x: Tensor) -> Tensor:
            return ops.cont(ops.narrow(x, axis=1, start=time - self.length, length=self.length))

        shape = (rows, self.top + 1, self.length)
        counted = input(IDS, shape, i32), input(PARTS, shape)
        divergence = ops.sub(beside(w, last(made.x), *counted), input(ENTROPY, (rows, self.length)))
        total = ops.add(made.loss, ops.sum(ops.mul(divergence, last(made.weights))))
        return named("loss", ops.scale(total, by=1 + self.weight))

    def targets(
        self, drawn: np.ndarray, ids: np.ndarray, logps: np.ndarray, logp: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of a text: IDS and PARTS (top + 1, length), ENTROPY (length,), and weights (length,) that add up to length.

        drawn, logp  (length,) the tokens of the text, and the base's log-probabilities of them
        ids, logps   (length, top) its likeliest tokens, and theirs
        """
        p = np.exp(logps.astype(np.float64))
        other = ~(ids == drawn[:, None]).any(-1)
        whole = p.sum(-1) + other
        entropy = -((p * logps).sum(-1) + np.where(other, logp, 0)) / whole
        parts = np.concatenate(((p.sum(-1) / whole)[None], -(p / whole[:, None]).T))
        names = np.concatenate((drawn[None], ids.T)).astype(np.int32)
        weights = whole * (len(drawn) / whole.sum())
        return names, parts.astype(np.float32), entropy.astype(np.float32), weights
