"""Distillation: learning what a larger model with the same vocabulary finds likely, token by token.

With q the model's and p the teacher's probabilities at temperature T, p over its likeliest tokens only, and a target y

    loss = (1 - weight) * -log q(y) + weight * T² * -(sum over these tokens of p log q_T)

Hinton et al. 2015, arXiv 1503.02531. The sum differs from the loss of one target by a product: with z = x @ head.T,
-(sum p log q) = -log q(y) + x · (head[y] - sum of p head), so that logits are computed once, in chunks, by the head.
A bias of the head adds bias[y] - sum of p bias. Capped logits are not linear in x, so such models are refused."""

from dataclasses import dataclass

import numpy as np

from packtrain.dtypes import i32
from packtrain.engine import ops
from packtrain.engine.tensor import Tensor, input, named
from packtrain.models import transformer
from packtrain.models.config import Config
from packtrain.models.lora_weights import Weights
from packtrain.models.tensor_shapes import HEAD_BIAS
from packtrain.models.transformer import LossOutputs

TEACHER_IDS, TEACHER_PARTS = "teacher_ids", "teacher_parts"  # inputs


@dataclass(frozen=True, slots=True)
class DistillationLoss:
    """Settings of the distillation loss."""

    weight: float = 0.5  # share of the teacher, up to 1; the data has the rest
    # divisor of both models' logits; more than 1 counts unlikely tokens more
    temperature: float = 1.0
    top: int = 16  # how many of the teacher's likeliest tokens count

    def numbers(self, time: int) -> int:
        """Return how many 4-byte numbers this loss adds to the inputs for a row of `time` tokens; plans count them."""
        return 2 * (self.top + 1) * time

    def loss(self, config: Config, w: Weights, base_loss: LossOutputs, chunk: int) -> Tensor:
        """Compute the loss (): (1 - weight) * the data's (base_loss) + weight * the teacher's; `chunk`: tokens whose
        logits exist at a time. Adds the graph inputs teacher_ids i32 and teacher_parts f32, (B, top + 1, T): rows of
        the head, and their weights by row_weights."""
        (rows, time, _), head, head_bias = base_loss.x.shape, transformer.head(w), w.get(HEAD_BIAS)
        shape = (rows, self.top + 1, time)
        teacher_inputs = input(TEACHER_IDS, shape, i32), input(TEACHER_PARTS, shape)
        mixed = _mix_rows(head, *teacher_inputs)
        expected_logits = ops.reshape(ops.sum_rows(ops.mul(base_loss.x, mixed)), shape=(rows, time))
        if head_bias is not None:
            bias_column = ops.reshape(head_bias, shape=(*head_bias.shape, 1))
            bias_logits = ops.reshape(_mix_rows(bias_column, *teacher_inputs), shape=(rows, time))
            expected_logits = ops.add(expected_logits, bias_logits)
        expected_logits = ops.sum(ops.mul(expected_logits, base_loss.weights))
        by = self.weight
        if self.temperature == 1:
            return named("loss", ops.add(base_loss.loss, ops.scale(expected_logits, by=by)))
        t = self.temperature
        tempered_loss = ops.linear_cross_entropy(
            ops.scale(base_loss.x, by=1 / t), head, base_loss.targets, base_loss.weights,
            None if head_bias is None else ops.scale(head_bias, by=1 / t), chunk=chunk, precision=config.precision,
        )[0]  # fmt: skip
        soft = ops.scale(ops.add(tempered_loss, ops.scale(expected_logits, by=1 / t)), by=by * t**2)
        return named(
            "loss", soft if by == 1 else ops.add(soft, ops.scale(base_loss.loss, by=1 - by))
        )

    def row_weights(self, logits: np.ndarray) -> np.ndarray:
        """Return weights (N, top + 1) f32 of the output head's rows for N targets: 1 for the data's token, -p for the
        teacher's, p = softmax(logits / temperature) over its likeliest tokens; logits (N, top), largest first."""
        e = np.exp((logits - logits[:, :1]).astype(np.float64) / self.temperature)
        p = e / e.sum(-1, keepdims=True)
        return np.concatenate((np.ones((len(p), 1)), -p), -1).astype(np.float32)


def _mix_rows(row_table: Tensor, ids: Tensor, parts: Tensor) -> Tensor:
    """Sum for each target the rows `ids` (B, n, T) of a table (V, N), weighted by `parts` (B, n, T): (B, T, N)."""
    (batch_rows, num_rows, num_tokens), mixed_rows = ids.shape, None
    for at in range(num_rows):
        row_ids, part = (ops.cont(ops.narrow(t, axis=1, start=at, length=1)) for t in (ids, parts))
        weighted_row = ops.get_rows(row_table, ops.reshape(row_ids, shape=(batch_rows, num_tokens)))
        weighted_row = ops.mul(weighted_row, ops.reshape(part, shape=(batch_rows, num_tokens, 1)))
        mixed_rows = weighted_row if mixed_rows is None else ops.add(mixed_rows, weighted_row)
    assert mixed_rows is not None
    return mixed_rows


def teacher_graphs(
    config: Config, w: Weights, time: int, num_rows: int, top: int, shared_vocab_size: int
) -> dict[str, dict[str, Tensor]]:
    """Return a teacher's graphs: `read` computes `hidden` states (1, time, C), `likely` the likeliest next tokens.

    num_rows  rows of `hidden` (num_rows, C), the input of `likely`; `read` has the inputs of a batch with one row
    top       likeliest tokens of each: `ids` and `logits` (num_rows, top), among the first `shared_vocab_size`
    """
    tokens, pos, seq = (input(name, (1, time), i32) for name in ("tokens", "pos", "seq"))
    *_, (hidden,) = transformer.residual_stream_in_parts(config, w, (tokens, pos, seq), 1)
    logits = transformer.logits(config, w, input("hidden", (num_rows, config.embedding_length)))
    if shared_vocab_size < config.vocab_size:
        logits = ops.cont(ops.narrow(logits, axis=1, start=0, length=shared_vocab_size))
    ids, top_logits = ops.candidates(logits, k=top)
    return {"read": {"hidden": hidden}, "likely": {"ids": ids, "logits": top_logits}}
