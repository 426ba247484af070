"""Memory of the host: allocate, view, upload, download, sync; nothing else."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from packtrain.tensor import Spec


class Backend(Protocol):
    """A set of kernels by `name` over memory of one `space`; backends that share a space share arrays."""

    @property
    def name(self) -> str: ...
    @property
    def space(self) -> str: ...
    @property
    def alignment(self) -> int: ...
    def alloc(self, nbytes: int) -> Any: ...
    def view(self, buffer: Any, offset: int, spec: Spec, strides: tuple[int, ...]) -> Any: ...
    def upload(self, array: Any, values: np.ndarray) -> None: ...
    def download(self, array: Any) -> np.ndarray: ...
    def sync(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Host:
    """NumPy arrays in ordinary memory."""

    name: str
    space: str = "host"
    alignment: int = 64

    def alloc(self, nbytes: int) -> np.ndarray:
        """A zeroed buffer, u8 (nbytes,), that starts at a multiple of `alignment`."""
        raw = np.zeros(nbytes + self.alignment, np.uint8)
        skip = -raw.__array_interface__["data"][0] % self.alignment
        return raw[skip : skip + nbytes]

    def view(
        self, buffer: np.ndarray, offset: int, spec: Spec, strides: tuple[int, ...]
    ) -> np.ndarray:
        """The array of `spec` at `offset` bytes."""
        shape = spec.dtype.array_shape(spec.shape)
        return np.ndarray(shape, spec.dtype.numpy, buffer, offset, strides)

    def upload(self, array: np.ndarray, values: np.ndarray) -> None:
        np.copyto(array, values)

    def download(self, array: np.ndarray) -> np.ndarray:
        """A copy that later runs do not change."""
        return array.copy()

    def sync(self) -> None:
        """Host kernels are done when they return."""
