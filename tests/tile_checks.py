"""What must hold of blocks in tiles of rows, for tests and for planted faults."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from packtrain.devtools.check.check_cases import run_graph
from packtrain.devtools.check.op_samples import store_values
from packtrain.dtypes import DTYPES, Dtype
from packtrain.engine import backends, row_tiles
from packtrain.engine.autodiff import differentiate
from packtrain.engine.graph import Graph
from packtrain.engine.memory_plan import verify
from packtrain.engine.tensor import Tensor
from packtrain.models import transformer
from packtrain.models.arch.architecture import is_matrix
from packtrain.models.config import Config
from packtrain.models.lora import SUFFIXES, Lora
from tests.architectures import CONFIGS
from tests.models import initial_weights

LORA = Lora((("blk.*", 4),), 0, 4.0)
ROWS, TIME, COUNT = 2, 24, 3
TOLERANCE = 3e-5  # of the largest value of a gradient; sums over tiles have another order


def leaf_types(config: Config, dtype: Dtype | None) -> dict[str, Dtype]:
    """The matrices of the base that may have this type, by name."""
    if dtype is None:
        return {}
    shapes = {name: leaf.shape for name, leaf in transformer.weights(config).items()}
    return {
        name: dtype
        for name, shape in shapes.items()
        if is_matrix(name, shape) and not name.endswith(SUFFIXES) and not shape[-1] % dtype.block
    }


def gradients(config: Config, count: int, dtype: Dtype | None = None) -> dict[str, np.ndarray]:
    """Loss and gradients of a batch of random tokens in two sequences, in `count` tiles of its rows."""
    leaves = transformer.weights(config, leaf_types(config, dtype))
    loss = transformer.loss(config, leaves, ROWS, TIME, chunk=16, num_row_tiles=count)
    read = Graph([loss.loss]).leaves
    trained = [t for t in read if t.role == "weight" and is_trained(config, t)]
    outputs = {t.label: d for t, d in differentiate(loss.loss, trained).items()}
    graph = Graph({"loss": loss.loss, **outputs})
    return run_graph(graph, leaf_values(config, graph), (backends.cpu,))


def is_trained(config: Config, leaf: Tensor) -> bool:
    return config.lora is None or leaf.label.endswith(SUFFIXES)


def leaf_values(config: Config, graph: Graph) -> Mapping[str, np.ndarray]:
    """A value for each leaf: adapters that change the model, norms about 1, and two sequences in a row."""
    rng, initial = np.random.default_rng(1), initial_weights(config, 1)
    tokens, targets = rng.integers(0, config.vocab_size, (2, ROWS, TIME))
    cut = TIME // 2 + 1
    position = np.arange(TIME)
    values = {
        "tokens": tokens,
        "targets": targets,
        "weights": np.full((ROWS, TIME), 1 / targets.size),
        "pos": np.tile(position - cut * (position >= cut), (ROWS, 1)),
        "seq": np.tile(position >= cut, (ROWS, 1)),
    }
    for leaf in sorted(graph.leaves, key=lambda leaf: leaf.label):  # whatever their order
        if leaf.role:
            noise = 0.03 * rng.standard_normal(leaf.shape).astype(np.float32)
            value = noise if leaf.label.endswith(SUFFIXES) else initial[leaf.label] + noise
            values[leaf.label] = value if leaf.dtype.block == 1 else store_values(value, leaf.dtype)
    return {
        leaf.label: np.asarray(values[leaf.label], leaf.dtype.numpy)
        for leaf in graph.leaves
        if leaf.kind != "constant"
    }


def check_gradients(name: str, is_lora: bool = False, dtype: str = "") -> None:
    """Blocks in tiles give the loss and the gradients of blocks without them, but for the order of additions."""
    config = replace(CONFIGS[name], lora=LORA if is_lora else None)
    expected, got = (gradients(config, n, DTYPES[dtype] if dtype else None) for n in (1, COUNT))
    assert expected.keys() == got.keys() and len(got) > 1
    for key, value in expected.items():
        off = np.abs(got[key] - value).max() / np.abs(value).max()
        assert off <= TOLERANCE, f"{name}: {key} is off by {off:.3g} of its largest value"


def programs(graph: Graph) -> list[row_tiles._TileProgram]:
    """The programs of all calls of a graph that run in tiles."""
    calls = [call for call in graph.calls if call.op in (row_tiles.tiled, row_tiles.tiled_back)]
    attrs = ({"dy_indices": (), "dx_indices": ()} | call.attrs for call in calls)
    return [row_tiles._program(a["body"], a["dy_indices"], a["dx_indices"]) for a in attrs]


def check_programs(graph: Graph) -> int:
    """Verify the plans of all bodies of a graph; return how many calls run in tiles."""
    for program in programs(graph):
        verify(program.plan, program.placed)
    return len(programs(graph))
