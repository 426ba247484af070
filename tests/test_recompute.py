"""Recomputation: what is kept changes memory, never a bit of a result."""

from collections.abc import Collection
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import packtrain as pt
from packtrain import Graph, Session, Tensor, differentiate, make_plan, place
from packtrain.dtypes import i32, i64
from packtrain.engine import ops
from packtrain.engine.optim import AdamW
from packtrain.models import transformer
from packtrain.planner.checkpointing import saved_values
from tests.models import (
    CONFIG,
    bind_graph,
    gradient_graph,
    same_bits,
    seeded_batch,
    seeded_weights,
    step_graph,
)

OPTIMIZER = AdamW(lr=1e-2)
ROWS, TIME = 2, 17


def step_phases(graph: Graph) -> list[str]:
    return [call.phase for call in graph.calls]


def trained_values(graph: Graph) -> dict[str, np.ndarray]:
    """All outputs of three steps, and every leaf after them."""
    session, seen = Session(), {}
    run = bind_graph(graph, seeded_weights(CONFIG), session)
    for t in range(1, 4):
        out = run(seeded_batch(CONFIG, ROWS, TIME, t) | OPTIMIZER.inputs(t))
        seen |= {f"{t} {name}": value for name, value in out.items()}
    leaves = [leaf.label for leaf in graph.leaves if leaf.kind in ("weight", "state")]
    return seen | {name: session.get(name) for name in leaves}


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_blocks_give_the_same_bits_as_keeping_everything(max_norm):
    everything = step_graph(CONFIG, ROWS, TIME, OPTIMIZER, max_norm=max_norm)
    blocks = step_graph(CONFIG, ROWS, TIME, OPTIMIZER, keep="blocks", max_norm=max_norm)
    assert (
        "recomputed" not in step_phases(everything) and step_phases(blocks).count("recomputed") > 10
    )
    assert same_bits(trained_values(blocks), trained_values(everything))


def random_gradients(share: float, seed: int) -> Graph:
    """Loss and gradients of a llama that keeps a random share of its forward values, views among them."""
    weights = transformer.weights(CONFIG)
    model = transformer.loss(CONFIG, weights, ROWS, TIME, chunk=16)
    rng = np.random.RandomState(seed)
    forward = [t for call in Graph([model.loss]).calls for t in call.results]
    keep = [t for t in forward if rng.random_sample() < share]
    weight_grads = differentiate(model.loss, list(weights.values()), keep)
    return Graph({"loss": model.loss} | {f"d/{w.name}": d for w, d in weight_grads.items()})


@cache
def kept_everything() -> dict[str, np.ndarray]:
    return bind_graph(random_gradients(1.0, 0), seeded_weights(CONFIG))(
        seeded_batch(CONFIG, ROWS, TIME)
    )


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_kept_values_give_the_same_bits(share, seed):
    graph, session = random_gradients(share, seed), Session()
    assert "recomputed" in step_phases(graph)
    placed = place(graph)
    plan = make_plan(placed)
    pt.verify(plan, placed)
    run = session.executor(placed, plan)
    session.set(seeded_weights(CONFIG))
    assert same_bits(run(seeded_batch(CONFIG, ROWS, TIME)), kept_everything())


def arena(keep: str | None, max_norm: float | None) -> int:
    deep = replace(CONFIG, block_count=12, embedding_length=32, feed_forward_length=88)
    graph = step_graph(deep, 4, 64, OPTIMIZER, keep=keep, max_norm=max_norm)
    return make_plan(place(graph)).arena().nbytes


def test_blocks_at_least_halve_the_arena_of_twelve_blocks():
    assert arena("blocks", None) <= arena(None, None) / 2


# ---- randomness ----------------------------------------------------------------------------------------------


def dropout_graph(keep: bool) -> Graph:
    """Loss and gradients of three layers with dropout; keep decides whether their inputs alone are kept."""
    h, key = pt.input("x", (9, 32)), pt.input("key", (2,), i64)
    layers = [pt.weight(f"w{i}", (32, 32)) for i in range(3)]
    stream = [h]
    for i, w in enumerate(layers):
        h = ops.add(h, ops.sqr(ops.dropout(ops.matmul(h, w), key, p=0.4, stream=i)))
        stream.append(h)
    loss = ops.sum(ops.sqr(h))
    weight_grads = differentiate(loss, layers, stream if keep else None)
    return Graph({"loss": loss} | {f"d/{w.name}": d for w, d in weight_grads.items()})


def test_recomputed_dropout_drops_the_same():
    rng = np.random.RandomState(0)
    layer_weights = {
        f"w{i}": rng.standard_normal((32, 32)).astype(np.float32) * 0.2 for i in range(3)
    }
    x = rng.standard_normal((9, 32)).astype(np.float32)
    recompute_run, stored_run = (
        bind_graph(dropout_graph(True), layer_weights),
        bind_graph(dropout_graph(False), layer_weights),
    )
    recomputed = [c.op.name for c in recompute_run.placed.graph.calls if c.phase == "recomputed"]
    assert recomputed.count("dropout") == 3
    first = recompute_run({"x": x, "key": np.array([3, 1])})
    assert same_bits(first, stored_run({"x": x, "key": np.array([3, 1])}))
    for key in ([3, 2], [4, 1]):
        assert not same_bits(first, recompute_run({"x": x, "key": np.array(key)}))


# ---- writes --------------------------------------------------------------------------------------------------


def state_graph(keep: Collection[str] | None) -> Graph:
    """A forward pass that writes rows of a state and reads them back, then two layers that could be recomputed."""
    x, w = pt.input("x", (2, 8)), pt.weight("w", (8, 8))
    memory, ids = pt.state("memory", (5, 8)), pt.constant("ids", np.array([3, 1]), i32)
    tensors: dict[str, Tensor] = {}
    tensors["a"] = ops.sqr(ops.matmul(x, w))
    (handle,) = ops.set_rows(memory, tensors["a"], ids)
    tensors["b"] = ops.silu(ops.matmul(handle, w))
    tensors["c"] = ops.tanh(ops.matmul(tensors["b"], w))
    loss = ops.sum(ops.sqr(tensors["c"]))
    kept_tensors = None if keep is None else [tensors[name] for name in keep]
    return Graph({"loss": loss, "d/w": differentiate(loss, [w], kept_tensors)[w]}, [handle])


@pytest.mark.parametrize("keep", ["c", "ac", "bc"])
def test_an_op_that_writes_is_never_recomputed(keep):
    graph, plain_graph = state_graph(keep), state_graph(None)
    recomputed_ops = [call.op for call in graph.calls if call.phase == "recomputed"]
    assert recomputed_ops and not any(op.writes for op in recomputed_ops)
    rng = np.random.RandomState(0)
    w, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 8), (2, 8)))
    results = []
    for candidate in (graph, plain_graph):
        run = bind_graph(candidate, {"w": w * 0.3})
        results.append(run({"x": x}) | {"memory": run.session.get("memory")})
    assert same_bits(*results)
    assert results[0]["memory"].any(axis=1).tolist() == [False, True, False, True, False]


def random_rank_graph(seed: int, deep: int) -> Graph:
    """A llama of four blocks whose forward values have random ranks."""
    config = replace(CONFIG, block_count=4)
    weights = transformer.weights(config)
    model = transformer.loss(config, weights, ROWS, TIME, chunk=16)
    rng = np.random.RandomState(seed)
    forward = [t for call in Graph([model.loss]).calls for t in call.results]
    ranks = {t: int(rng.randint(0, deep + 1)) for t in forward if rng.random_sample() < 0.5}
    ranks |= {model.block_outputs[0]: 0, model.block_outputs[-1]: 0}
    weight_grads = differentiate(model.loss, list(weights.values()), ranks)
    return Graph({"loss": model.loss} | {f"d/{w.name}": d for w, d in weight_grads.items()})


@pytest.mark.parametrize("deep", [0, 1, 3])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_any_ranks_give_the_same_bits(seed, deep):
    config = replace(CONFIG, block_count=4)
    graph, session = random_rank_graph(seed, deep), Session()
    placed = place(graph)
    plan = make_plan(placed)
    pt.verify(plan, placed)
    run = session.executor(placed, plan)
    session.set(seeded_weights(config))
    reference = bind_graph(gradient_graph(config, ROWS, TIME), seeded_weights(config))(
        seeded_batch(config, ROWS, TIME)
    )
    got = run(seeded_batch(config, ROWS, TIME))
    assert same_bits(got, {name: reference[name] for name in got})


def residual_rank_graph(stream: tuple[int, ...]) -> Graph:
    """A llama whose residual stream has these ranks and nothing else is kept."""
    config = replace(CONFIG, block_count=len(stream) - 1)
    weights = transformer.weights(config)
    model = transformer.loss(config, weights, 8, 64, chunk=16)
    ranks = dict(zip(model.block_outputs, stream, strict=True))
    weight_grads = differentiate(model.loss, list(weights.values()), ranks)
    return Graph({"loss": model.loss} | {f"d/{w.name}": d for w, d in weight_grads.items()})


def test_a_higher_rank_is_less_memory_and_more_work():
    flat, nested = (
        residual_rank_graph((0, 1, 1, 1, 1, 1, 1, 1, 0)),
        residual_rank_graph((0, 3, 2, 3, 1, 3, 2, 3, 0)),
    )
    assert step_phases(nested).count("recomputed") > 1.2 * step_phases(flat).count("recomputed")
    arenas = [make_plan(place(graph)).arena().nbytes for graph in (nested, flat)]
    assert arenas[0] < arenas[1]


def test_a_block_that_lacks_an_op_is_matched_by_ops():
    """The input of the op that it lacks stands for that op's value, whatever follows."""
    x = pt.input("x", (4,))
    template = [first := ops.silu(x), second := ops.neg(first), ops.exp(second)]
    block = [gate := ops.silu(x), ops.exp(gate)]
    assert saved_values._match_values(block, template) == [gate, gate, block[1]]
