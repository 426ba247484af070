"""Results of epochs: loss and accuracy with their uncertainty, and predictions."""

import math
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Result:
    """Loss, accuracy and predictions collected over physical batches, see ggml_opt_result.

    mean         losses are means over their batches, and so is the result's; else they are sums, which add up
    keep         whether to save predictions, too
    """

    mean: bool = True
    keep: bool = False
    ndata: int = 0
    labels: int = 0  # more than datapoints, if each has several
    losses: list[float] = field(default_factory=list)
    correct: int | None = None
    kept: list[np.ndarray] = field(default_factory=list)

    def add(
        self, ndata: int, loss: float, correct: int | None, predictions: np.ndarray | None,
        labels: int | None = None,
    ) -> None:  # fmt: skip
        """Add the outputs of a physical batch of `ndata` datapoints: its mean or summed `loss`, and how many of its
        `labels` (None: `ndata`) the model predicted, `correct`."""
        self.ndata += ndata
        self.labels += ndata if labels is None else labels
        self.losses.append(loss)
        if correct is not None:
            self.correct = (self.correct or 0) + correct
        if self.keep and predictions is not None:
            self.kept.append(predictions)

    @property
    def loss(self) -> float:
        """Mean or sum of the batches' losses; 0 before any."""
        loss_sum = math.fsum(self.losses)
        return loss_sum / max(len(self.losses), 1) if self.mean else loss_sum

    @property
    def loss_error(self) -> float:
        """Standard error of a mean, or sample standard deviation of the summands of a sum; NaN below two batches."""
        n = len(self.losses)
        if n < 2:
            return math.nan
        mean_loss = math.fsum(self.losses) / n
        variance = math.fsum((x - mean_loss) ** 2 for x in self.losses) / (n - 1)
        return math.sqrt(variance / n if self.mean else variance)

    @property
    def accuracy(self) -> float:
        """Share of labels that were predicted; NaN for models without classes."""
        return math.nan if self.correct is None else self.correct / self.labels

    @property
    def accuracy_error(self) -> float:
        """Standard error of the accuracy; NaN below two labels."""
        if self.correct is None or self.labels < 2:
            return math.nan
        return math.sqrt(self.accuracy * (1 - self.accuracy) / (self.labels - 1))

    @property
    def predictions(self) -> np.ndarray:
        """Predictions of all datapoints in the order in which they came; empty unless `keep`."""
        return np.concatenate(self.kept) if self.kept else np.empty(0, np.float32)

    @property
    def brief(self) -> str:
        """`0.0712±0.0004 acc 97.9±0.1%`: the loss, and the accuracy where there is one, with their errors."""
        error_text = "" if math.isnan(self.loss_error) else f"±{self.loss_error:.4f}"
        if self.correct is None:
            return f"{self.loss:.4f}{error_text}"
        accuracy_error = self.accuracy_error
        accuracy_error_text = "" if math.isnan(accuracy_error) else f"±{100 * accuracy_error:.1f}"
        return f"{self.loss:.4f}{error_text} acc {100 * self.accuracy:.1f}{accuracy_error_text}%"

    def __str__(self) -> str:
        """`loss 0.0712±0.0004 acc 97.9±0.1%`, or `no data`."""
        return f"loss {self.brief}" if self.ndata else "no data"
