"""Small llamas with their values and batches, and ways to run them: what whole-model tests share."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from packtrain import Executor, Graph, Session, differentiate, place
from packtrain.dtypes import i32
from packtrain.engine import backends
from packtrain.engine.backends import Target
from packtrain.engine.optim import AdamW, training_graph
from packtrain.engine.tensor import input
from packtrain.models import transformer
from packtrain.models.config import Config

CONFIG = Config(
    vocab_size=50,
    context_length=32,
    embedding_length=24,
    block_count=2,
    feed_forward_length=36,
    head_count=4,
    head_count_kv=2,
)
NO_TARGET = -1


def seeded_weights(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights large enough that every block matters. RandomState's stream is frozen; so are these numbers."""
    rng, weights = np.random.RandomState(seed), {}
    for name, leaf in transformer.weights(config).items():
        uniform = rng.random_sample(leaf.shape) * 2 - 1
        value = uniform * (3 / leaf.shape[-1]) ** 0.5 if len(leaf.shape) > 1 else 1 + 0.3 * uniform
        weights[name] = value.astype(np.float32)
    return weights


def seeded_batch(config: Config, rows: int, time: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Rows that each hold two samples of random lengths, uneven weights, and some tokens without a target."""
    rng = np.random.RandomState(1000 + seed)
    tokens = rng.randint(0, config.vocab_size, (rows, time + 1))
    targets = np.where(rng.random_sample((rows, time)) < 0.1, NO_TARGET, tokens[:, 1:])
    cut = rng.randint(1, time, (rows, 1)) if time > 1 else np.ones((rows, 1), int)
    positions = np.arange(time)[None]
    weights = (0.5 + rng.random_sample((rows, time))) / (rows * time)
    return {
        "tokens": tokens[:, :-1].astype(np.int32),
        "targets": targets.astype(np.int32),
        "weights": weights.astype(np.float32),
        "pos": np.where(positions < cut, positions, positions - cut).astype(np.int32),
        "seq": (positions >= cut).astype(np.int32),
    }


def gradient_graph(
    config: Config, rows: int, time: int, *, keep: str | None = None, chunk: int = 16
) -> Graph:
    """Outputs `loss`, `losses` and `d/<name>` of every weight."""
    weights = transformer.weights(config)
    built = transformer.loss(config, weights, rows, time, chunk=chunk)
    checkpoints = built.block_outputs if keep == "blocks" else None
    grads = differentiate(built.loss, list(weights.values()), checkpoints)
    by_name = {f"d/{w.name}": d for w, d in grads.items()}
    return Graph({"loss": built.loss, "losses": built.losses, **by_name})


def step_graph(
    config: Config,
    rows: int,
    time: int,
    optimizer: AdamW,
    *,
    keep: str | None = None,
    max_norm: float | None = None,
    chunk: int = 16,
) -> Graph:
    """One training step with the outputs `loss` and `squares`."""
    weights = transformer.weights(config)
    built = transformer.loss(config, weights, rows, time, chunk=chunk)
    checkpoints = built.block_outputs if keep == "blocks" else None
    return training_graph(
        {"loss": built.loss}, list(weights.values()), optimizer, keep=checkpoints, max_norm=max_norm
    )


def eval_graph(config: Config, rows: int, time: int) -> Graph:
    """The outputs `loss` and `losses` alone."""
    built = transformer.loss(config, transformer.weights(config), rows, time, chunk=16)
    return Graph({"loss": built.loss, "losses": built.losses})


def logits_graph(config: Config, rows: int, time: int) -> Graph:
    """The full forward without a cache: `logits` (rows, time, V) from `tokens`, `pos` and `seq`."""
    weights = transformer.weights(config)
    tokens, pos, seq = (input(name, (rows, time), i32) for name in ("tokens", "pos", "seq"))

    mixer = transformer.batch_mixer(config, pos, seq)
    *_, h = transformer.residual_stream(config, weights, tokens, pos, mixer, time)
    return Graph([transformer.logits(config, weights, h)])


def bind_graph(
    graph: Graph,
    leaf_values: Mapping[str, Any] | None = None,
    session: Session | None = None,
    backend: backends.Backend = backends.cpu,
) -> Executor:
    """An executor of the graph in a session (a fresh one by default), with its leaves given their values."""
    run = (session or Session()).executor(place(graph, Target((backend,))))
    run.session.set(leaf_values or {})
    return run


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """How far two arrays are from each other, relative to the norm of what is expected."""
    norm = float(np.linalg.norm(expected))
    return float(np.linalg.norm(np.asarray(got, np.float64) - expected)) / (norm or 1.0)


def same_bits(got: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Whether two results have the same names and the same bytes."""
    return got.keys() == expected.keys() and all(
        np.asarray(got[k]).tobytes() == np.asarray(expected[k]).tobytes() for k in expected
    )


def initial_weights(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Values with which training begins, by name."""
    values = {
        name: np.empty(leaf.shape, np.float32) for name, leaf in transformer.weights(config).items()
    }
    transformer.initialize_weights(config, seed, lambda name, fill: fill(values[name]))
    return values
