"""The replay loss keeps a tuned model near the base on texts that the base wrote. Robins 1995, Catastrophic
forgetting, rehearsal and pseudorehearsal.

With p the base's and q the tuned model's probabilities of the next token,

    loss = mean of -log q(target) over the data + weight * mean of sum p log(p / q) over the texts

The head is frozen, so that the sum over the vocabulary needs only the mean of its rows by p: with logits x @ head.T,

    sum p log(p / q) = -log q(y) + x · (head[y] - mean) - entropy of p + (head's bias: a constant)

for any y; logits are computed once, in chunks, by the head. The divergence's gradient is 0 where q = p."""

from dataclasses import dataclass

from packtrain.dtypes import i32
from packtrain.engine import ops
from packtrain.engine.tensor import Tensor, input, named
from packtrain.models.config import Config
from packtrain.models.lora_weights import Weights
from packtrain.models.transformer import LossOutputs, head

IDS, MEANS, CONSTANTS = "replay_ids", "replay_means", "replay_constants"  # inputs


@dataclass(frozen=True, slots=True)
class ReplayLoss:
    """Settings of the replay loss."""

    length: int  # tokens of a text at the end of every row
    weight: float  # weight of the texts, where the data counts 1
    num_texts: int  # number of texts
    head_width: int  # width of the head's rows

    @property
    def mark(self) -> str:
        """Text saved beside the texts, and compared on resume; another wording would not match existing files."""
        return f"Replay(length={self.length}, weight={self.weight}, texts={self.num_texts}, width={self.head_width})"

    def numbers(self, time: int) -> int:
        """Return how many 4-byte numbers this loss adds to the inputs for a row of `time` tokens; plans count them."""
        return (self.head_width + 2) * min(self.length, time)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all texts: for each token its id, its constant and its mean of head rows in f16."""
        return self.num_texts * self.length * (2 * self.head_width + 8)

    def loss(self, config: Config, w: Weights, base_loss: LossOutputs, chunk: int) -> Tensor:
        """Compute the loss (): the data's (base_loss), plus the divergence from the base on the last `length` tokens of
        each row, its texts. Adds the graph inputs IDS i32 and CONSTANTS (B, length), and MEANS (B, length, C)."""
        batch_rows, time, width = base_loss.x.shape
        length = min(self.length, time)  # the search for a context that fits tries shorter rows

        def last(x: Tensor) -> Tensor:
            return ops.cont(ops.narrow(x, axis=1, start=time - length, length=length))

        shape = batch_rows, length
        target_rows = ops.get_rows(head(w), input(IDS, shape, i32))
        logit_diffs = ops.sum_rows(
            ops.mul(last(base_loss.x), ops.sub(target_rows, input(MEANS, (*shape, width))))
        )
        divergence = ops.add(ops.reshape(logit_diffs, shape=shape), input(CONSTANTS, shape))
        total_loss = ops.add(base_loss.loss, ops.sum(ops.mul(divergence, last(base_loss.weights))))
        return named("loss", ops.scale(total_loss, by=1 + self.weight))
