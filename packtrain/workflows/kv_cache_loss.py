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


class Through:
    """A context of one sequence, and the loss head behind it; rows have `time` tokens, `counted` targets at most."""

    def __init__(
        self, model: ModelFile, time: int, counted: int, cache: str, *, swa_full: bool, target: Target
    ) -> None:  # fmt: skip
        self._counted = counted
        self._context = Context(
            model, cells=time, cache=cache, swa_full=swa_full, checkpoints=0, hidden=True, target=target
        )  # fmt: skip
        self._head = head_of(model, counted, target)

    def losses(self, batches: Iterable[Batch]) -> Iterator[np.ndarray]:
        """For each batch the losses (N,) f32 of the targets that have a weight, in order."""
        for batch in batches:
            yield np.concatenate([self._row(row) for row in rows_of(batch)])

    def _row(self, row: Batch) -> np.ndarray:
        """Of one row, whose samples are read one after the other."""
        is_scored, hidden = row["weights"] > 0, list[np.ndarray]()
        skipped = len(row["tokens"]) - len(is_scored)
        places = np.flatnonzero(is_scored) + skipped
        for sample in dict.fromkeys(row["seq"][places].tolist()):
            positions = np.flatnonzero(row["seq"] == sample)
            output_rows = places[row["seq"][places] == sample] - positions[0]
            self._context.remove(0)
            hidden.append(
                self._context.decode(row["tokens"][positions].tolist(), wanted=output_rows.tolist())
            )
        count, width = len(places), self._context.config.embedding_length
        inputs = {
            "x": np.zeros((self._counted, width), np.float32),
            "targets": np.full(self._counted, -1, np.int32),
            "weights": np.ones(self._counted, np.float32),
        }
        if count:
            inputs["x"][:count] = np.concatenate(hidden)
            inputs["targets"][:count] = row["targets"][is_scored]
        return self._head(inputs)["losses"][:count]


def rows_of(batch: Batch) -> Iterator[Batch]:
    for i in range(len(batch["tokens"])):
        yield {name: values[i] for name, values in batch.items()}


def head_of(model: ModelFile, count: int, target: Target) -> Executor:
    """`losses` of the rows of hidden values, with the mapped weights."""
    session = Session(target.limits)
    session.share(model.stored())
    losses = hidden_losses(model.config, weights(model.config, model.types()), count)
    placed = place(Graph({"losses": losses}), target)
    return session.executor(placed, make_plan(placed))
