"""Any model's leaves as a GGUF file, by name."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from packtrain.gguf import GGUF, Deferred, GGUFError, Value, write

ARCHITECTURE = "packtrain-model"


class Loaded(Mapping[str, np.ndarray]):
    """The tensors of a GGUF file by name, mapped; `metadata` are its other values."""

    def __init__(self, path: Path) -> None:
        self._file = GGUF(path)
        self.metadata = dict(self._file.metadata)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._file.array(name)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._file.entries)

    def __len__(self) -> int:
        return len(self._file.entries)


def save(
    path: str | Path,
    values: Mapping[str, np.ndarray],
    metadata: Mapping[str, str | int | float | bool] | None = None,
) -> None:
    """Write tensors by name as a GGUF file, atomically: `pt.save("mnist.gguf", trainer.weights)`.

    metadata  more keys; general.architecture is `packtrain-model` unless given
    Raises GGUFError for what the format cannot hold, OSError.
    """
    entries = {"general.architecture": ARCHITECTURE, **(metadata or {})}
    tensors = {name: Deferred.of(values.__getitem__, name) for name in values}
    write(path, {key: _value(key, value) for key, value in entries.items()}, tensors)


def load(path: str | Path) -> Loaded:
    """The tensors of a GGUF file by name: `pt.fit(..., values=pt.load("mnist.gguf"))`. Raises GGUFError, OSError."""
    return Loaded(Path(path))


def _value(key: str, value: object) -> Value:
    kinds = {bool: "bool", int: "i64", float: "f64", str: "string"}
    if type(value) not in kinds:
        raise GGUFError(f"metadata {key}: {value!r} must be a text, a number or a bool")
    return Value(kinds[type(value)], value)
