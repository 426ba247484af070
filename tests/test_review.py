"""Mistakes that a reader found once: each stays found."""

import numpy as np
import pytest

import packtrain as pt
from packtrain.engine.graph import Graph
from packtrain.engine.optim.adamw import opt_step_adamw
from packtrain.engine.tensor import Spec


def run(graph: Graph, **values: np.ndarray) -> dict[str, np.ndarray]:
    session = pt.Session()
    executor = session.executor(pt.place(graph))
    leaves = {leaf.label: leaf.kind for leaf in graph.leaves}
    session.set({name: value for name, value in values.items() if leaves[name] != "input"})
    return executor({name: value for name, value in values.items() if leaves[name] == "input"})


def test_one_gradient_for_two_inputs_is_not_added_into():
    @pt.op()
    def both_products(a: pt.Tensor, b: pt.Tensor) -> Spec:
        """y = (a + b) @ 1: a rule whose inputs share one gradient tensor."""
        return Spec((a.shape[0], 1))

    del pt.engine.tensor.OPS["both_products"]  # the registry is what ships

    @both_products.vjp
    def both_products_vjp(dy, y, a, b):
        d = pt.matmul(dy, pt.constant("ones", np.ones((a.shape[1], 1))))
        return d, d

    a, b = pt.weight("a", (2, 3)), pt.weight("b", (2, 3))
    y = both_products(a, b)
    gradients = pt.differentiate(pt.add(pt.sum(y), pt.scale(pt.sum(a), by=100.0)), [a, b])
    values = {"a": np.zeros((2, 3)), "b": np.zeros((2, 3))}
    got = pt.interpret(Graph({"da": gradients[a], "db": gradients[b]}), values)
    assert (got["da"] == 101).all() and (got["db"] == 1).all()


def test_what_is_written_is_read_once():
    leaf = pt.state("cache", (4, 2))
    ids = pt.constant("ids", np.array([1, 2]), pt.i32)
    with pytest.raises(pt.GraphError, match=r"cache is written, so it must be .* read once"):
        pt.set_rows(leaf, pt.narrow(leaf, axis=0, start=0, length=2), ids)
    w, g = pt.weight("w", (2,)), pt.input("g", (2,))
    with pytest.raises(pt.GraphError, match="w is written"):
        opt_step_adamw(
            w, g, w, pt.state("v", (2,)), pt.input("h", (7,)), pt.input("s", ()), decay=True
        )


def test_a_refusal_in_a_gradient_names_its_call():
    q = pt.weight("q", (1, 3, 2, 4))
    lse = pt.attention(q, q, q, scale=0.5)[1]
    with pytest.raises(pt.GraphError, match=r"attention: the log-sum-exp .*\n  at test_review.py:"):
        pt.differentiate(pt.sum(lse), [q])


def test_updates_are_handles():
    with pytest.raises(pt.GraphError, match="updates has w; each must be the handle"):
        Graph({"y": pt.neg(pt.input("x", (1,)))}, [pt.weight("w", (2,))])


def test_a_sum_over_outer_and_inner_axes_is_carried_in_f64():
    got = run(Graph([pt.named("y", pt.sum_to(pt.input("x", (200_000, 3, 2)), shape=[3, 1]))]),
              x=np.full((200_000, 3, 2), 0.1, np.float32))  # fmt: skip
    assert got["y"].shape == (3, 1) and np.allclose(got["y"], 40_000, rtol=1e-6)


def test_shapes_are_not_negative_and_constants_are_exact():
    with pytest.raises(pt.GraphError, match="reshape"):
        pt.reshape(pt.input("x", (6,)), shape=(-2, -3))
    with pytest.raises(pt.GraphError, match="c: its values are not all i32"):
        pt.constant("c", np.array([1.7]), pt.i32)


def test_an_index_error_names_line_and_inputs():
    graph = Graph({"y": pt.get_rows(pt.weight("w", (3, 2)), pt.input("ids", (2,), pt.i32))})
    with pytest.raises(
        IndexError, match=r"index 9 at position 1 .*\n  at test_review.py:\d+\n    w: f32\[3, 2\]\n"
    ):
        run(graph, w=np.ones((3, 2)), ids=np.array([0, 9]))


def test_setting_every_leaf_cleans_a_dirty_session():
    session = pt.Session()
    session.executor(pt.place(Graph({"y": pt.neg(pt.weight("w", (2,)))})))
    session.dirty = "an update failed"
    session.set({"w": np.ones(2)})
    assert (session.get("w") == 1).all()
