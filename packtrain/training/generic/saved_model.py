"""Any model's leaves as a GGUF file, by name."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from packtrain.gguf import GGUF, DeferredTensor, GGUFError, MetadataValue, write_gguf
from packtrain.training.checkpoint_shards import LazyArrays

ARCHITECTURE = "packtrain-model"


class MappedTensors(LazyArrays):
    """Mapping from names to the mapped tensors of a GGUF file; `metadata` holds its other values."""

    def __init__(self, path: Path) -> None:
        gguf = GGUF(path)
        super().__init__(gguf.array, gguf.entries)
        self.metadata = dict(gguf.metadata)


def save(
    path: str | Path,
    values: Mapping[str, np.ndarray],
    metadata: Mapping[str, str | int | float | bool] | None = None,
) -> None:
    """Write tensors by name as a GGUF file, atomically: `pt.save("mnist.gguf", trainer.weights)`.

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
    gguf_types = {bool: "bool", int: "i64", float: "f64", str: "string"}
    if type(value) not in gguf_types:
        raise GGUFError(f"metadata {key}: {value!r} must be a text, a number or a bool")
    return MetadataValue(gguf_types[type(value)], value)
