"""The executable specification: run a Graph with `numpy` kernels on fresh arrays, in any float precision.

No placement, no plan, no reuse. Slow and simple; the engine must give equal results.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from packtrain.dtypes import f32
from packtrain.engine.graph import Graph
from packtrain.engine.tensor import Call, Tensor


def interpret(
    graph: Graph, values: Mapping[str, Any], real: type = np.float64
) -> dict[str, np.ndarray]:
    """Run the graph; return outputs, and new values of updated leaves, by name. `real` is the type that stands for f32.

    values  a value for every weight, state and input leaf, by name
    """
    return _Interpreter(values, real).run(graph)


class _Interpreter:
    def __init__(self, values: Mapping[str, Any], real: type) -> None:
        self.values, self.real_dtype = values, np.dtype(real)
        self.storage: dict[Tensor, np.ndarray] = {}

    def run(self, graph: Graph) -> dict[str, np.ndarray]:
        for leaf in graph.leaves:
            value = leaf.value if leaf.kind == "constant" else self.values[leaf.label]
            shape = leaf.dtype.array_shape(leaf.shape)
            self.storage[leaf] = np.array(value, self._dtype(leaf), order="C").reshape(shape)
        with np.errstate(all="ignore"):
            for call in graph.calls:
                if not call.op.view:
                    self._run_call(call)
        updated = {t.base.label: self.storage[t.base].copy() for t in graph.updates}
        return updated | {name: self._storage_view(t).copy() for name, t in graph.outputs.items()}

    def _run_call(self, call: Call) -> None:
        inputs = [None if t is None else self._storage_view(t) for t in call.inputs]
        for t in call.results:
            if t.base is t:
                self.storage[t] = np.full(t.shape, np.nan if t.dtype is f32 else 0, self._dtype(t))
        results = tuple(self._storage_view(t) for t in call.results)
        kernel_out = results if call.returns_tuple else results[0]
        call.op.kernels["numpy"].run(kernel_out, *inputs, **call.attrs)

    def _dtype(self, t: Tensor) -> np.dtype:
        return self.real_dtype if t.dtype is f32 else t.dtype.numpy

    def _storage_view(self, t: Tensor) -> np.ndarray:
        storage = self.storage[t.base]
        size_ratio = storage.itemsize // t.dtype.block_nbytes
        strides = tuple(s * size_ratio for s in t.strides)
        shape = t.dtype.array_shape(t.shape)
        return np.ndarray(shape, storage.dtype, storage, t.offset * size_ratio, strides)
