"""Gradients through keys and values that earlier chunks of a text left, and of several texts at once, in one graph."""

from dataclasses import replace

import numpy as np
import pytest

from packtrain.dtypes import i32
from packtrain.engine import ops
from packtrain.engine.autodiff import differentiate
from packtrain.engine.graph import Graph
from packtrain.engine.tensor import Tensor, input
from packtrain.models import transformer
from packtrain.models.block import Mixer
from packtrain.models.config import Config
from packtrain.models.lora import Lora
from tests.models import CONFIG, bind_graph, gradient_graph, seeded_batch, seeded_weights

ROWS, TIME = 2, 12
LOW = replace(CONFIG, lora=Lora((("blk.*.attn_q.weight", 2), ("blk.*.ffn_down.weight", 3)), 0, 4.0))


def in_chunks(config: Config, sizes: tuple[int, ...]) -> Graph:
    """As tests.models.gradients, but chunk by chunk: each attends to what those before left, and to itself."""
    w = transformer.weights(config)
    named = {name: input(name, (ROWS, TIME), i32) for name in ("tokens", "targets", "pos", "seq")}
    weights = input("weights", (ROWS, TIME))
    cached_pairs: dict[int, list[tuple[Tensor, Tensor]]] = {}
    cached_positions: list[tuple[Tensor, Tensor]] = []
    hidden_states = list[Tensor]()

    def joined(parts: list[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else ops.concat(parts, axis=1)

    at = 0
    for size in sizes:
        tokens, pos, seq = (
            ops.narrow(named[name], axis=1, start=at, length=size)
            for name in ("tokens", "pos", "seq")
        )
        cached_positions.append((pos, seq))
        all_pos, all_seq = (joined([*tensors]) for tensors in zip(*cached_positions, strict=True))

        def attend(
            i: int,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            sinks: Tensor | None,
            positions=(pos, all_pos, seq, all_seq),
        ) -> Tensor:
            cached_pairs.setdefault(i, []).append((k, v))
            keys, cached_values = (
                joined([*tensors]) for tensors in zip(*cached_pairs[i], strict=True)
            )
            return transformer.attend_batch(config, i, q, keys, cached_values, sinks, *positions)

        *_, h = transformer.residual_stream(config, w, tokens, pos, Mixer(attend), TIME)
        hidden_states.append(h)
        at += size
    x = transformer.output_norm(config, w, joined(hidden_states))
    head_args = transformer.head(w), named["targets"], weights
    loss, losses = ops.linear_cross_entropy(x, *head_args, chunk=16, softcap=0.0)[:2]
    tensors = differentiate(loss, list(w.values()))
    return Graph({"loss": loss, "losses": losses, **{f"d/{t.name}": d for t, d in tensors.items()}})


def data(config: Config) -> dict[str, np.ndarray]:
    return seeded_batch(config, ROWS, TIME) | {
        "weights": np.full((ROWS, TIME), 1 / (ROWS * TIME), np.float32)
    }


def assert_close_gradients(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert np.abs(value).max() > 0, name
        np.testing.assert_allclose(
            actual[name], value, atol=2e-5 * max(1e-2, np.abs(value).max()), err_msg=name
        )


@pytest.mark.parametrize("sizes", [(6, 6), (1, 7, 4), (12,)])
@pytest.mark.parametrize("config", [CONFIG, LOW], ids=["all", "low rank"])
def test_chunks_give_the_gradients_of_the_whole(config: Config, sizes: tuple[int, ...]) -> None:
    """A later chunk's loss reaches the weights through the keys and values of the earlier ones."""
    start = seeded_weights(config)
    inputs = data(config)
    expected = bind_graph(gradient_graph(config, ROWS, TIME), start)(inputs)
    assert_close_gradients(bind_graph(in_chunks(config, sizes), start)(inputs), expected)


def test_several_texts_in_one_row_give_the_sum_of_each() -> None:
    """Two texts of unlike length, one after the other in the row, do not see each other; nor do their gradients."""
    start, inputs = seeded_weights(CONFIG), data(CONFIG)
    lengths = 5, 7
    row = {name: value[:1].copy() for name, value in inputs.items()}
    row["pos"][0] = np.concatenate([np.arange(n) for n in lengths])
    row["seq"][0] = np.repeat([0, 1], lengths)
    outputs = bind_graph(gradient_graph(CONFIG, 1, TIME), start)(row)
    parts, at = [], 0
    for n in lengths:
        part = {name: value[:, at : at + n] for name, value in row.items()}
        parts.append(bind_graph(gradient_graph(CONFIG, 1, n), start)(part))
        at += n
    losses = np.concatenate([part.pop("losses") for part in parts], axis=1)
    np.testing.assert_allclose(outputs.pop("losses"), losses, atol=1e-5)
    assert_close_gradients(outputs, {name: parts[0][name] + parts[1][name] for name in parts[0]})
