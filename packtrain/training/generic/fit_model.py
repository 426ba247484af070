"""A model to train: its loss, and the outputs that results report besides the loss; its leaves as a GGUF file."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from packtrain.dtypes import TRAINABLE, f32, i32
from packtrain.engine import ops
from packtrain.engine.graph import Graph
from packtrain.engine.tensor import GraphError, Tensor, constant
from packtrain.gguf import GGUF, DeferredTensor, GGUFError, MetadataValue, write_gguf
from packtrain.training.checkpoint_shards import LazyArrays


@dataclass(frozen=True, slots=True)
class Model:
    """The loss of a physical batch, as tensors; the first axis of its inputs counts datapoints.

    loss         ()  f32
    predictions  (B, C) f32 scores of classes or (B,) i32 class ids, for accuracy; or any output to be saved
    labels       (B,) i32 class ids or (B, C) f32 probabilities: what predictions should be; without, no accuracy
    mean         the loss is a mean over datapoints, otherwise a sum
    frozen       name patterns of weights that are not trained
    """

    loss: Tensor
    predictions: Tensor | None = None
    labels: Tensor | None = None
    mean: bool = True
    frozen: tuple[str, ...] | str = ()

    @classmethod
    def cross_entropy(cls, logits: Tensor, labels: Tensor) -> "Model":
        """Model with the mean cross-entropy of logits (B, C) to class ids (B,) i32 or probabilities (B, C) f32."""
        if len(logits.shape) != 2 or labels.shape not in (logits.shape, logits.shape[:1]):
            raise GraphError(
                f"cross_entropy: logits are {logits.spec} and labels {labels.spec};"
                " they must be f32[B, C], and i32[B] or f32[B, C]"
            )
        num_rows = logits.shape[0]
        loss_weights = constant("weights", np.full(num_rows, 1 / max(num_rows, 1)))
        loss_op = ops.cross_entropy if labels.dtype == i32 else ops.soft_cross_entropy
        return cls(loss_op(logits, labels, loss_weights)[0], logits, labels)

    @classmethod
    def mean_squared_error(cls, outputs: Tensor, targets: Tensor) -> "Model":
        """Model whose loss is the mean of (outputs - targets)² over all elements."""
        return cls(ops.mean_squared_error(outputs, targets), outputs)

    @classmethod
    def average(cls, outputs: Tensor) -> "Model":
        """Model whose loss is the mean of all outputs."""
        return cls(ops.mean(outputs), outputs)

    @classmethod
    def total(cls, outputs: Tensor) -> "Model":
        """Model whose loss is the sum of all outputs."""
        return cls(ops.sum(outputs), outputs, mean=False)

    @property
    def outputs(self) -> dict[str, Tensor]:
        """Outputs by name: `loss`, and if the model has them, `predictions` and the number of `correct` ones."""
        outputs = {"loss": self.loss}
        if self.predictions is not None:
            outputs["predictions"] = self.predictions
        if self.predictions is not None and self.labels is not None:
            outputs["correct"] = ops.count_equal(_classes(self.predictions), _classes(self.labels))
        return outputs

    @property
    def label_count(self) -> int | None:
        """Number of labels of a physical batch, one per row of scores; None without labels."""
        labels = self.labels
        if labels is None:
            return None
        return int(np.prod(labels.shape if labels.dtype == i32 else labels.shape[:-1]))

    @property
    def classes(self) -> tuple[str, int]:
        """Return (name of the input with class ids, number of classes); ("", 0) if unknown."""
        scores, labels = self.predictions, self.labels
        if scores is None or labels is None or (scores.dtype, labels.dtype) != (f32, i32):
            return "", 0
        leaves = Graph([labels]).leaves
        return (leaves[0].label, scores.shape[-1]) if len(leaves) == 1 else ("", 0)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return Graph(self.outputs).leaves

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {leaf.label: leaf for leaf in self.leaves if leaf.kind == "input"}

    @property
    def trained(self) -> list[Tensor]:
        """Weights of the loss that are trained: f32 or bf16, not frozen. Raises GraphError."""
        patterns = (self.frozen,) if isinstance(self.frozen, str) else self.frozen
        weights = [leaf for leaf in Graph([self.loss]).leaves if leaf.role == "weight"]
        for pattern in patterns:
            if not any(fnmatchcase(leaf.label, pattern) for leaf in weights):
                names = ", ".join(leaf.label for leaf in weights)
                raise GraphError(f"frozen={pattern!r} is no weight of the loss; it has {names}")
        frozen = {t.label for t in weights for pattern in patterns if fnmatchcase(t.label, pattern)}
        return [t for t in weights if t.dtype in TRAINABLE and t.label not in frozen]


def _classes(t: Tensor) -> Tensor:
    """Return class ids (B,) i32: the argmax of scores, or ids as they are."""
    return ops.argmax(t) if t.dtype == f32 else t


def initial_weight(leaf: Tensor, seed: int) -> np.ndarray:
    """Return the initial value of a weight, drawn by (seed, name): matrices and filters normal with variance 1 /
    fan-in; vectors 0, or 1 if their name has `norm` and not `bias`."""
    if len(leaf.shape) < 2:
        is_norm = "norm" in leaf.label and "bias" not in leaf.label
        return np.full(leaf.shape, float(is_norm), np.float32)
    rng = np.random.default_rng([seed, *leaf.label.encode()])
    samples = rng.standard_normal(leaf.shape, dtype=np.float32)
    return samples * np.float32(np.prod(leaf.shape[1:]) ** -0.5)


ARCHITECTURE = "packtrain-model"


class MappedTensors(LazyArrays):
    """Mapping from names to the mapped tensors of a GGUF file; `metadata` holds its other values."""

    def __init__(self, path: Path) -> None:
        gguf = GGUF(path)
        super().__init__(gguf.array, gguf.entries)
        self.metadata = dict(gguf.metadata)


def save(
    path: str | Path, values: Mapping[str, np.ndarray],
    metadata: Mapping[str, str | int | float | bool] | None = None,
) -> None:  # fmt: skip
    """Write `values`, tensors by name, as a GGUF file, atomically: `pt.save("mnist.gguf", trainer.weights)`.

    metadata  more keys; general.architecture is `packtrain-model` unless given
    Raises GGUFError for what the format cannot hold, OSError.
    """
    metadata_values = {"general.architecture": ARCHITECTURE, **(metadata or {})}
    tensors = {name: DeferredTensor.from_reader(values.__getitem__, name) for name in values}
    write_gguf(path, {key: _value(key, value) for key, value in metadata_values.items()}, tensors)


def load(path: str | Path) -> MappedTensors:
    """Map a GGUF file's tensors by name: `pt.fit(..., values=pt.load("mnist.gguf"))`. Raises GGUFError, OSError."""
    return MappedTensors(Path(path))


def _value(key: str, value: object) -> MetadataValue:
    """Return a value as metadata of the GGUF type for its Python type. Raises GGUFError for other types of value."""
    gguf_types = {bool: "bool", int: "i64", float: "f64", str: "string"}
    if type(value) not in gguf_types:
        raise GGUFError(f"metadata {key}: {value!r} must be a text, a number or a bool")
    return MetadataValue(gguf_types[type(value)], value)
