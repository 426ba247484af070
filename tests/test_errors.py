"""What an error says: op, fact with both numbers, requirement, call site, and one line per input."""

import inspect
import re

import numpy as np
import pytest

import packtrain as pt
from packtrain import Graph, GraphError, debug, differentiate, make_plan, place
from packtrain.dtypes import i32
from packtrain.engine import ops
from packtrain.engine.backends import Target
from packtrain.engine.optim import AdamW
from packtrain.engine.tensor import Kernel, named
from packtrain.models.config import PRESETS
from packtrain.planner.step_shape import StepShape
from packtrain.planner.training_plans import make_plans
from tests.models import CONFIG, bind_graph, same_bits, seeded_batch, seeded_weights, step_graph

FILE = "test_errors.py"


def caller_line() -> int:
    """The number of the line that calls this."""
    return inspect.currentframe().f_back.f_lineno


def error_text(error: pytest.ExceptionInfo[BaseException]) -> str:
    return str(error.value)


# ---- building ------------------------------------------------------------------------------------------------


def test_a_shape_that_does_not_fit():
    h, w = pt.input("h", (3, 4)), pt.weight("blk.0.attn_q.weight", (5, 6))
    made_at = caller_line() + 1
    x = named("blk.0.attn_norm", ops.rms_norm(h, eps=1e-5))
    with pytest.raises(GraphError) as error:
        ops.matmul(x, w)
    assert error_text(error).splitlines() == [
        "matmul: last axis of x f32[3, 4] (4) must equal last axis of w f32[5, 6] (6)",
        f"  at {FILE}:{made_at + 2}",
        f"    blk.0.attn_norm: f32[3, 4] = rms_norm(h, eps=1e-05)  # {FILE}:{made_at}",
        "    blk.0.attn_q.weight: f32[5, 6]",
    ]


def test_a_dtype_that_does_not_fit():
    ids = pt.input("ids", (3,), i32)
    with pytest.raises(GraphError) as error:
        ops.add(ids, pt.input("x", (3,)))
    assert error_text(error).startswith("add: ")
    assert "i32[3]" in error_text(error) and "f32[3]" in error_text(error)
    assert "    ids: i32[3]\n    x: f32[3]" in error_text(error)


def test_an_input_that_is_no_tensor():
    with pytest.raises(GraphError, match=r"matmul: input 1 is 3; only tensors are inputs"):
        ops.matmul(pt.input("x", (3, 4)), 3)


def test_an_attribute_that_is_misspelt():
    with pytest.raises(TypeError, match="epsilon"):
        ops.rms_norm(pt.input("x", (3, 4)), epsilon=1e-5)


def test_a_view_that_needs_a_copy():
    x = ops.transpose(pt.input("x", (3, 4)))
    with pytest.raises(GraphError, match=r"reshape: x f32\[4, 3\] .* without a copy; use cont"):
        ops.reshape(x, shape=(12,))


def test_a_leaf_of_an_impossible_shape():
    with pytest.raises(GraphError, match=r"w: shape \(2, 100\) is not possible; q4_K .*256"):
        pt.weight("w", (2, 100), pt.dtypes.DTYPES["q4_K"])


def test_a_tensor_is_named_once():
    x = named("x", ops.neg(pt.input("y", (3,))))
    with pytest.raises(GraphError, match="x already has a name and cannot become z"):
        named("z", x)


def test_two_leaves_of_one_name():
    first_leaf, second_leaf = pt.weight("w", (3,)), pt.weight("w", (3,))
    with pytest.raises(GraphError, match="two leaves are called w"):
        Graph([ops.add(first_leaf, second_leaf)])


def test_only_a_whole_leaf_is_written():
    x, ids = pt.input("x", (2, 3)), pt.constant("ids", np.arange(2), i32)
    for target in (x, ops.narrow(pt.state("s", (5, 3)), axis=0, start=0, length=4)):
        with pytest.raises(GraphError, match="so it must be a whole weight or state leaf"):
            ops.set_rows(target, x, ids)


# ---- handles -------------------------------------------------------------------------------------------------


def written_state() -> tuple[pt.Tensor, pt.Tensor, int]:
    """A state leaf, its handle after a write, and the line of that write."""
    leaf, x = pt.state("cache", (5, 3)), pt.input("x", (2, 3))
    at = caller_line() + 1
    (handle,) = ops.set_rows(leaf, x, pt.constant("ids", np.arange(2), i32))
    return leaf, handle, at


def test_a_leaf_read_as_it_was_before_a_write():
    leaf, handle, wrote_at = written_state()
    stale_view = ops.narrow(leaf, axis=0, start=1, length=2)
    with pytest.raises(GraphError) as error:
        Graph([ops.neg(stale_view)], updates=[handle])
    assert error_text(error) == (
        f"narrow: reads cache as it was before set_rows wrote it at {FILE}:{wrote_at}; read the handle that "
        f"set_rows returned, or copy the value before the write\n  at {FILE}:{stale_view.call.origin[1]}"
    )


def test_a_leaf_read_before_the_write_and_an_output_of_it():
    leaf, _, _ = written_state()
    with pytest.raises(GraphError, match="output old: reads cache as it was before set_rows"):
        Graph({"old": leaf, "new": written_again(leaf)})


def written_again(leaf: pt.Tensor) -> pt.Tensor:
    ids = pt.constant("ids", np.arange(2), i32)
    return ops.set_rows(leaf, pt.input("x", (2, 3)), ids)[0]


def test_a_gradient_that_needs_the_value_before_a_write():
    leaf, w = pt.state("cache", (5, 3)), pt.weight("w", (4, 3))
    loss = ops.sum(ops.sqr(ops.matmul(leaf, w)))
    (handle,) = ops.set_rows(leaf, pt.input("x", (2, 3)), pt.constant("ids", np.arange(2), i32))
    gradient = differentiate(loss, [w])[w]
    with pytest.raises(GraphError, match="out_prod: reads cache as it was before set_rows wrote"):
        Graph([gradient], updates=[handle])


# ---- differentiating -----------------------------------------------------------------------------------------


def test_missing_gradients_are_named_all_at_once():
    x = pt.weight("x", (3, 4))
    gate = ops.clip_gate(ops.sum_squares(x), max_norm=1.0)
    dy = pt.input("dy", (3, 4))
    silu_gradient = ops.silu_back(dy, ops.mul(x, ops.broadcast_to(gate, shape=(3, 4))))
    with pytest.raises(GraphError) as error:
        differentiate(ops.sum(silu_gradient), [x])
    text = error_text(error).splitlines()
    assert text[0] == "no gradient (vjp) for 2 calls:"
    assert [re.search(r"= (\w+)\(", entry).group(1) for entry in text[1:]] == [
        "clip_gate",
        "silu_back",
    ]
    assert all(f"# {FILE}:" in entry for entry in text[1:])


def test_a_loss_that_is_no_scalar():
    x = pt.weight("x", (3,))
    with pytest.raises(GraphError, match=r"the loss is f32\[3\]; only a scalar f32\[\]"):
        differentiate(ops.neg(x), [x])


def test_a_loss_that_does_not_depend_on_a_weight():
    x, y, z = (pt.weight(name, (3,)) for name in "xyz")
    with pytest.raises(GraphError, match="the loss does not depend on y, z"):
        differentiate(ops.sum(x), [x, y, z])


# ---- placing and planning ------------------------------------------------------------------------------------


def test_homes_of_unknown_leaves():
    homes = {"moment": pt.backends.cpu, "v": pt.backends.cpu}
    with pytest.raises(GraphError, match=r"homes names \['v'\], which are no leaves"):
        make_plans(StepShape(PRESETS["1m"], 1, 8), AdamW(), target=Target(homes=homes))


def test_a_target_of_nothing():
    with pytest.raises(GraphError, match="at least one backend"):
        Target(())


def test_a_plan_of_another_graph():
    def place_neg(n: int) -> pt.Placed:
        return place(Graph({"y": ops.neg(pt.input("x", (n,)))}))

    planned_graph, equal_graph, other_graph = place_neg(3), place_neg(3), place_neg(4)
    plan = make_plan(planned_graph)
    pt.Session().executor(equal_graph, plan)
    for use in (
        lambda: pt.Session().executor(other_graph, plan),
        lambda: pt.verify(plan, other_graph),
    ):
        with pytest.raises(GraphError) as error:
            use()
        made_for, fingerprint = planned_graph.fingerprint, other_graph.fingerprint
        assert made_for != fingerprint
        expected = (
            f"the plan is for graph {made_for}, not for this graph {fingerprint}; plan it again"
        )
        assert error_text(error) == expected


def test_text_that_is_no_plan():
    good = make_plan(place(Graph({"y": ops.neg(pt.input("x", (3,)))})))
    assert pt.Plan.from_json(good.to_json()) == good
    for text in ("", "[]", "{}", '{"arenas": 3}', good.to_json().replace('"offset"', '"of"')):
        with pytest.raises(ValueError, match="this is not a plan in JSON"):
            pt.Plan.from_json(text)


# ---- running with someone looking ----------------------------------------------------------------------------


def test_nan_in_the_forward_pass_names_op_and_line():
    x = pt.input("x", (2, 3))
    at = caller_line() + 1
    y = named("root", ops.sqrt(x))
    run = bind_graph(Graph({"y": ops.neg(y)}))
    values = np.array([[1, 4, 9], [1, -7, 2]], np.float32)
    assert np.isnan(run({"x": values})["y"]).any()
    with debug("nan"), pytest.raises(FloatingPointError) as error:
        run({"x": values})
    assert error_text(error).splitlines() == [
        "sqrt: root is nan at [1, 1]",
        f"  at {FILE}:{at} (forward)",
        "    x: f32[2, 3] from -7 to 9",
    ]


def test_nan_in_the_backward_pass_names_the_forward_line():
    x = pt.weight("x", (3,))
    y = ops.scale(x, by=4.0)
    at = caller_line() + 1
    loss = ops.sum(ops.sqrt(y))
    run = bind_graph(Graph({"loss": loss, "d/x": differentiate(loss, [x])[x]}))
    run.session.set({"x": np.array([1, 0, 4])})
    with debug("nan"), pytest.raises(FloatingPointError) as error:
        run({})
    summary, location, *inputs = error_text(error).splitlines()
    assert re.fullmatch(r"\w+: \S+ is (inf|nan) at \[1\]", summary)
    assert location == f"  at {FILE}:{at} (backward)"
    assert "    sqrt: f32[3] from 0 to 4" in inputs


def test_an_unknown_flag(monkeypatch):
    text = "PACKTRAIN_DEBUG: nans, x unknown; choose from graph, place, plan, time, nan, poison"
    with pytest.raises(ValueError, match=text), debug("nans,poison,x"):
        pass
    monkeypatch.setenv("PACKTRAIN_DEBUG", "poison,nans,x")
    with pytest.raises(ValueError, match=text):
        bind_graph(Graph({"y": ops.neg(pt.input("x", (3,)))}))


def test_flags_come_from_the_environment(monkeypatch):
    run = bind_graph(Graph({"y": ops.sqrt(pt.input("x", (3,)))}))
    monkeypatch.setenv("PACKTRAIN_DEBUG", " nan, ")
    with pytest.raises(FloatingPointError, match="sqrt: "):
        run({"x": np.array([-1, 0, 1])})
    with debug(""):
        run({"x": np.array([-1, 0, 1])})


def test_printing_flags(capsys):
    x = pt.input("x", (3,))
    with debug("graph,place,plan,time"):
        bind_graph(Graph({"y": ops.neg(x)}))({"x": np.ones(3)})
    printed = capsys.readouterr().err
    for expected in (
        "graph of 1 calls", "input x: f32[3]", "neg: neg on cpu", "plan of 1 steps", "ms 100.0%  neg",
    ):  # fmt: skip
        assert expected in printed


def test_a_planted_wrong_kernel_is_caught_by_comparing(monkeypatch):
    def wrong(y, gate, up):
        ops.swiglu.kernels["numpy"].run(y, gate, up)
        y.reshape(-1)[-1] *= 1.01

    monkeypatch.setitem(ops.swiglu.kernels, "cpu", Kernel(wrong, strided=False))
    run = bind_graph(step_graph(CONFIG, 1, 8, AdamW(), max_norm=1.0), seeded_weights(CONFIG))
    fed = seeded_batch(CONFIG, 1, 8) | AdamW().inputs(1)
    with debug("compare"), pytest.raises(AssertionError) as error:
        run(fed)
    text = (
        r"swiglu: blk.0.ffn_swiglu differs from the specification by \S+ \(.*\)\n  at block.py:\d+"
    )
    assert re.fullmatch(text, error_text(error))


def test_comparing_finds_nothing_where_nothing_is_wrong():
    plain_run, compared = (
        bind_graph(step_graph(CONFIG, 1, 8, AdamW(), max_norm=1.0), seeded_weights(CONFIG))
        for _ in range(2)
    )
    fed = seeded_batch(CONFIG, 1, 8) | AdamW().inputs(1)
    expected = plain_run(fed)
    with debug("compare,poison,nan"):
        assert same_bits(compared(fed), expected)


# ---- a step that is not finite -------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [None, "blocks"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_explained(keep):
    run = bind_graph(
        step_graph(CONFIG, 1, 8, AdamW(), keep=keep, max_norm=1.0), seeded_weights(CONFIG)
    )
    fed = seeded_batch(CONFIG, 1, 8) | AdamW().inputs(1)
    run(fed)
    leaves = [x.label for x in run.placed.graph.leaves if x.kind in ("weight", "state")]
    state_before = {name: run.session.get(name) for name in leaves}
    infinite_batch = fed | {"weights": fed["weights"] * np.float32(np.inf)}
    assert not np.isfinite(run(infinite_batch)["squares"])
    assert same_bits({name: run.session.get(name) for name in leaves}, state_before)
    said = run.diagnose(infinite_batch)
    assert re.match(
        r"linear_cross_entropy: loss is \w+ at \[\]\n  at transformer.py:\d+ \(forward\)", said
    )
    assert "weights: f32[1, 8] from inf to inf" in said
    assert same_bits({name: run.session.get(name) for name in leaves}, state_before)
    assert run.diagnose(fed) is None
    assert same_bits({name: run.session.get(name) for name in leaves}, state_before)
    assert np.isfinite(run(fed)["loss"])


# ---- watching ------------------------------------------------------------------------------------------------


def test_watchers_see_what_the_pattern_names():
    run = bind_graph(step_graph(CONFIG, 1, 8, AdamW(), max_norm=1.0), seeded_weights(CONFIG))
    fed = seeded_batch(CONFIG, 1, 8) | AdamW().inputs(1)
    watched: list[tuple[str, np.ndarray]] = []
    for pattern in ("blk.?.ffn_down", "d/blk.0.attn_q.weight", "loss"):
        run.watch(pattern, lambda name, value: watched.append((name, value)))
    output = run(fed)
    names, watched_values = zip(*watched, strict=True)
    assert names == ("blk.0.ffn_down", "blk.1.ffn_down", "loss", "d/blk.0.attn_q.weight")
    assert watched_values[0].shape == (1, 8, CONFIG.embedding_length)
    assert watched_values[2] == output["loss"]
    copies = [value.copy() for value in watched_values]
    run(fed)
    assert len(watched) == 8
    assert all(map(np.array_equal, watched_values, copies)), "a watcher's value is a copy"
    assert not np.array_equal(watched[4][1], copies[0]), (
        "the second run saw the update of the first"
    )
