"""Losses of a model that reads through a KV cache, as it does when it writes."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from packtrain.engine.backends import Target
from packtrain.engine.executor import Executor, Session
from packtrain.engine.graph import Graph
from packtrain.engine.memory_plan import make_plan
from packtrain.engine.placement import place
from packtrain.inference.kv_cache import Context
from packtrain.models.cached_transformer import hidden_losses
from packtrain.models.model_file import ModelFile
from packtrain.models.transformer import weights

Batch = Mapping[str, np.ndarray]
MAX_HEAD_ROWS = 64  # targets whose losses are computed at a time


class CachedLoss:
    """A context of one sequence with a loss head; rows have `row_tokens` tokens and at most `max_targets` targets."""

    def __init__(
        self, model: ModelFile, row_tokens: int, max_targets: int, cache_type: str, *, swa_full: bool, target: Target
    ) -> None:  # fmt: skip
        self._max_targets = max_targets = min(max_targets, MAX_HEAD_ROWS)
        self._context = Context(
            model, cells=row_tokens, cache=cache_type, swa_full=swa_full, checkpoints=0, hidden=True, target=target
        )  # fmt: skip
        self._loss_head = loss_head(model, max_targets, target)

    def losses(self, batches: Iterable[Batch]) -> Iterator[np.ndarray]:
        """Yield for each batch the losses (N,) f32 of the targets that have a weight, in order."""
        for batch in batches:
            hidden_values = [x for row in batch_rows(batch) for x in self._row_hidden(row)]
            targets = batch["targets"][batch["weights"] > 0]
            if hidden_values:
                yield self._head_losses(np.concatenate(hidden_values), targets)
            else:
                yield np.zeros(0, np.float32)

    def _row_hidden(self, row: Batch) -> Iterator[np.ndarray]:
        """Yield the hidden values before the targets of one row, whose samples are read one after the other.

        A sample reuses the cells of the tokens with which the sample before begins, too.
        """
        is_scored = row["weights"] > 0
        num_skipped = len(row["tokens"]) - len(is_scored)
        scored_positions = np.flatnonzero(is_scored) + num_skipped
        for sample_id in dict.fromkeys(row["seq"][scored_positions].tolist()):
            positions = np.flatnonzero(row["seq"] == sample_id)
            output_rows = scored_positions[row["seq"][scored_positions] == sample_id] - positions[0]
            ids = row["tokens"][positions].tolist()
            num_cached = self._context.reuse(0, ids[: output_rows[0] + 1])
            rows = (output_rows - num_cached).tolist()
            yield self._context.decode(ids[num_cached:], wanted=rows)

    def _head_losses(self, hidden_values: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the losses of targets (N,) after hidden values (N, C)."""
        losses, size = list[np.ndarray](), self._max_targets
        for start in range(0, len(targets), size):
            count = min(size, len(targets) - start)
            head_inputs = {
                "x": np.zeros((size, hidden_values.shape[1]), np.float32),
                "targets": np.full(size, -1, np.int32),
                "weights": np.ones(size, np.float32),
            }
            head_inputs["x"][:count] = hidden_values[start : start + count]
            head_inputs["targets"][:count] = targets[start : start + count]
            losses.append(self._loss_head(head_inputs)["losses"][:count])
        return np.concatenate(losses)


def batch_rows(batch: Batch) -> Iterator[Batch]:
    for row_index in range(len(batch["tokens"])):
        yield {input_name: batch_values[row_index] for input_name, batch_values in batch.items()}


def loss_head(model: ModelFile, max_targets: int, target: Target) -> Executor:
    """Create an executor of the `losses` of rows of hidden values, with the mapped weights."""
    session = Session(target.limits)
    session.share(model.stored())
    losses = hidden_losses(model.config, weights(model.config, model.matrix_dtypes()), max_targets)
    placed = place(Graph({"losses": losses}), target)
    return session.executor(placed, make_plan(placed))
