"""The loss of a model in a file, with mapped weights: for eval, and for the end of a fine-tuning run."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from packtrain.common.errors import DoesNotFit
from packtrain.common.mapped_file import pages_within
from packtrain.common.memory import total_nbytes
from packtrain.engine.backends import CPU, Target
from packtrain.engine.executor import Executor, Session
from packtrain.engine.graph import Graph
from packtrain.engine.memory_plan import Plan, make_plan, size_text
from packtrain.engine.placement import Placed, place
from packtrain.models import transformer
from packtrain.models.model_file import ModelFile
from packtrain.training.training_engine import with_targets

MAX_EXPONENT = 700.0  # e to a larger power overflows a float


def loss_executor(
    model: ModelFile, rows: int, time: int, chunk: int = 256, skipped: int = 0, target: Target = CPU,
    resident: str | None = None,
) -> Executor:  # fmt: skip
    """Create an executor that returns `losses` (rows, time - skipped) of `rows` × `time` tokens, with weights mapped
    from the model's file. `chunk`: tokens whose logits exist at a time; `skipped`: first positions of a row, not
    scored; `resident`, as "2G": limit on private memory and the file's pages together. Raises DoesNotFit."""
    placed, plan = loss_plan(model, rows, time, chunk, skipped, target)
    available_nbytes = total_nbytes()
    if plan.arena().nbytes > available_nbytes:
        raise DoesNotFit(
            f"windows of {rows} × {time} tokens need {size_text(plan.arena().nbytes)}, and there "
            f"are {size_text(available_nbytes)}; a smaller --ctx or --batch-size needs less"
        )
    with pages_within(resident, lambda: plan.arena().nbytes):
        session = Session(target.limits)
        session.share(model.stored())
        return session.executor(placed, plan)


def loss_plan(
    model: ModelFile, rows: int, time: int, chunk: int = 256, skipped: int = 0, target: Target = CPU
) -> tuple[Placed, Plan]:
    """Place and plan a graph of losses for `rows` × `time` tokens a batch: `chunk`, `skipped` as in loss_executor."""
    leaves = transformer.weights(model.config, model.matrix_dtypes())
    loss = transformer.loss(model.config, leaves, rows, time, chunk=chunk, skipped=skipped)
    placed = place(Graph({"losses": loss.losses}), target)
    return placed, make_plan(placed)


def counted(run: Executor, batches: Iterable[Mapping[str, np.ndarray]]) -> Iterator[np.ndarray]:
    """Yield each batch's losses (N,) f32 of targets of weight above 0, in order; `run`: made by `loss_executor`."""
    for batch in batches:
        yield run({**batch, **with_targets(batch)})["losses"][batch["weights"] > 0]


@dataclass(frozen=True, slots=True)
class MeanEstimate:
    """A mean and its standard error, as in llama-perplexity: values count as independent."""

    value: float
    error: float

    @staticmethod
    def of(values: np.ndarray) -> "MeanEstimate":
        """Return the mean of values and its standard error."""
        wide = values.astype(np.float64)
        error = math.sqrt(float(wide.var()) / (len(wide) - 1)) if len(wide) > 1 else math.nan
        return MeanEstimate(float(wide.mean()), error)

    @property
    def exponential(self) -> "MeanEstimate":
        """The exponential of the mean with its error: the perplexity, if the mean is a loss."""
        value = math.exp(self.value) if self.value < MAX_EXPONENT else math.inf
        return MeanEstimate(value, value * self.error)

    def __str__(self) -> str:
        return self.text(4)

    def text(self, digits: int) -> str:
        error = "" if math.isnan(self.error) else f" ± {self.error:.{digits}f}"
        return f"{self.value:.{digits}f}{error}"
