"""Distillation: learning what a larger model with the same vocabulary finds likely, token by token.

With q the model's and p the teacher's probabilities at temperature T, p among its likeliest tokens alone, of a target y

    loss = (1 - weight) * -log q(y) + weight * T² * -(sum over these tokens of p log q_T)

Hinton et al. 2015, arXiv 1503.02531. The sum differs from the loss of one target by a product: with z = x @ head.T,
-(sum p log q) = -log q(y) + x · (head[y] - sum of p head), so that logits are computed once, in chunks, by the head.
A bias of the head adds the same of its own.
"""

from dataclasses import dataclass

import numpy as np

from packtrain.dtypes import i32
from packtrain.engine import ops
from packtrain.engine.tensor import Tensor, input, named
from packtrain.models import transformer
from packtrain.models.block_weights import Weights
from packtrain.models.config import Config
from packtrain.models.tensor_shapes import HEAD_BIAS
from packtrain.models.transformer import Loss

IDS, PARTS = "teacher_ids", "teacher_parts"  # inputs


@dataclass(frozen=True, slots=True)
class Distill:
    """The settings of the loss.

    weight       the teacher's share, up to 1; the rest is the data's
    temperature  both models' logits are divided by it; more than 1 counts unlikely tokens more
    top          how many of the teacher's likeliest tokens count
    """

    weight: float = 0.5
    temperature: float = 1.0
    top: int = 16

    def numbers(self, time: int) -> int:
        """How many numbers of 4 bytes the inputs of a row of `time` tokens hold."""
        return 2 * (self.top + 1) * time

    def loss(self, config: Config, w: Weights, base_loss: Loss, chunk: int) -> Tensor:
        """The loss (). Adds inputs `teacher_ids` i32 and `teacher_parts`, (B, top + 1, T), see `parts`."""
        (rows, time, _), head, bias = base_loss.x.shape, transformer.head(w), w.get(HEAD_BIAS)
        shape = (rows, self.top + 1, time)
        counted = input(IDS, shape, i32), input(PARTS, shape)
        mixed = _mixed(head, *counted)
        expected_logits = ops.reshape(ops.sum_rows(ops.mul(base_loss.x, mixed)), shape=(rows, time))
        if bias is not None:
            column = ops.reshape(bias, shape=(*bias.shape, 1))
            of_bias = ops.reshape(_mixed(column, *counted), shape=(rows, time))
            expected_logits = ops.add(expected_logits, of_bias)
        expected_logits = ops.sum(ops.mul(expected_logits, base_loss.weights))
        by = self.weight
        if self.temperature == 1:
            return named("loss", ops.add(base_loss.loss, ops.scale(expected_logits, by=by)))
        t = self.temperature
        sharp = ops.linear_cross_entropy(
            ops.scale(base_loss.x, by=1 / t), head, base_loss.targets, base_loss.weights,
            None if bias is None else ops.scale(bias, by=1 / t), chunk=chunk, precision=config.precision,
        )[0]  # fmt: skip
        soft = ops.scale(ops.add(sharp, ops.scale(expected_logits, by=1 / t)), by=by * t**2)
        return named(
            "loss", soft if by == 1 else ops.add(soft, ops.scale(base_loss.loss, by=1 - by))
        )

    def parts(self, logits: np.ndarray) -> np.ndarray:
        """How much rows of the head count, (N, top + 1) f32: 1 of the target, then -p of the teacher's tokens.

        logits  (N, top)  the teacher's, the largest first
        """
        e = np.exp((logits - logits[:, :1]).astype(np.float64) / self.temperature)
        p = e / e.sum(-1, keepdims=True)
        return np.concatenate((np.ones((len(p), 1)), -p), -1).astype(np.float32)


def _mixed(table: Tensor, ids: Tensor, parts: Tensor) -> Tensor:
    """Of each target, the sum of rows of a table (V, N), as much as each counts: (B, T, N)."""
    (rows, count, time), mixed = ids.shape, None
    for at in range(count):
        chosen, part = (ops.cont(ops.narrow(t, axis=1, start=at, length=1)) for t in (ids, parts))
        row = ops.get_rows(table, ops.reshape(chosen, shape=(rows, time)))
        row = ops.mul(row, ops.reshape(part, shape=(rows, time, 1)))
        mixed = row if mixed is None else ops.add(mixed, row)
    assert mixed is not None
    return mixed


def reading(
    config: Config, w: Weights, time: int, num_rows: int, top: int, shared: int
) -> dict[str, dict[str, Tensor]]:
    """Outputs of a teacher: `read` gives the `hidden` states (1, time, C) of tokens, `likely` the likeliest tokens.

    num_rows  tokens whose likeliest are computed in one run
    top       how many of each: `ids` and `logits` (num_rows, top), of the first `shared` of its vocabulary
    """
    tokens, pos, seq = (input(name, (1, time), i32) for name in ("tokens", "pos", "seq"))
    *_, (last,) = transformer.in_parts(config, w, (tokens, pos, seq), 1)
    logits = transformer.logits(config, w, input("hidden", (num_rows, config.embedding_length)))
    if shared < config.vocab_size:
        logits = ops.cont(ops.narrow(logits, axis=1, start=0, length=shared))
    ids, values = ops.candidates(logits, k=top)
    return {"read": {"hidden": last}, "likely": {"ids": ids, "logits": values}}
