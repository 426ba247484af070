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


class CachedLoss:
    """A context of one sequence with a loss head; rows have `row_tokens` tokens and at most `max_targets` targets."""

    def __init__(
        self, model: ModelFile, row_tokens: int, max_targets: int, cache_type: str, *, swa_full: bool, target: Target
    ) -> None:  # fmt: skip
        self._max_targets = max_targets
        self._context = Context(
            model, cells=row_tokens, cache=cache_type, swa_full=swa_full, checkpoints=0, hidden=True, target=target
        )  # fmt: skip
        self._loss_head = loss_head(model, max_targets, target)

    def losses(self, batches: Iterable[Batch]) -> Iterator[np.ndarray]:
        """Yield for each batch the losses (N,) f32 of the targets that have a weight, in order."""
        for batch in batches:
            yield np.concatenate([self._row_losses(batch_row) for batch_row in batch_rows(batch)])

    def _row_losses(self, row: Batch) -> np.ndarray:
        """Return the losses of one row, whose samples are read one after the other."""
        is_scored, hidden_values = row["weights"] > 0, list[np.ndarray]()
        num_skipped = len(row["tokens"]) - len(is_scored)
        scored_positions = np.flatnonzero(is_scored) + num_skipped
        for sample_id in dict.fromkeys(row["seq"][scored_positions].tolist()):
            positions = np.flatnonzero(row["seq"] == sample_id)
            output_rows = scored_positions[row["seq"][scored_positions] == sample_id] - positions[0]
            self._context.remove(0)
            hidden_values.append(
                self._context.decode(row["tokens"][positions].tolist(), wanted=output_rows.tolist())
            )
        num_scored, width = len(scored_positions), self._context.config.embedding_length
        head_inputs = {
            "x": np.zeros((self._max_targets, width), np.float32),
            "targets": np.full(self._max_targets, -1, np.int32),
            "weights": np.ones(self._max_targets, np.float32),
        }
        if num_scored:
            head_inputs["x"][:num_scored] = np.concatenate(hidden_values)
            head_inputs["targets"][:num_scored] = row["targets"][is_scored]
        return self._loss_head(head_inputs)["losses"][:num_scored]


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
