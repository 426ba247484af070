"""Plans: offsets, lifetimes and what is done in place, proven by replaying them and by random graphs."""

import itertools
import sys

import numpy as np
import pytest

import packtrain as pt
from packtrain.engine import backends, ops
from packtrain.engine.backends import Target
from packtrain.engine.memory_plan import Plan
from packtrain.engine.memory_plan.memory_plan import Packer
from packtrain.engine.packing import lower_bound, pack, packing_height
from packtrain.engine.packing.pack import first_fit
from tests import checks, plan_checks
from tests.online import best_fit
from tests.plan_checks import small_graph
from tests.random_graphs import random_case

SEEDS = range(200)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_graph_needs_no_luck(seed: int) -> None:
    plan_checks.check_case(seed)


@pytest.mark.parametrize("seed", SEEDS[::6])
def test_numpy_planned_is_numpy_on_fresh_arrays(seed: int) -> None:
    plan_checks.check_numpy(seed)


@pytest.mark.parametrize("seed", SEEDS[::3])
def test_recomputation_changes_no_bit(seed: int) -> None:
    plan_checks.check_recomputed(seed)


@pytest.mark.parametrize("seed", SEEDS[::4])
def test_gradients_of_a_random_graph_are_its_slope(seed: int) -> None:
    plan_checks.check_slope(seed)


@pytest.mark.parametrize("seed", SEEDS[1::5])
def test_two_memory_spaces(seed: int) -> None:
    plan_checks.check_spaces(seed)


@pytest.mark.parametrize("seed", SEEDS[:30:3])
def test_executors_share_an_arena(seed: int) -> None:
    plan_checks.check_session([seed, seed + 1, seed + 2])


def test_random_graphs_have_everything() -> None:
    """The generator did not lose what the tests above are about."""
    calls = [call for seed in SEEDS[:100] for call in random_case(seed).graph.calls]
    names, phases = {call.op.name for call in calls}, {call.phase for call in calls}
    assert phases == {"forward", "backward", "recomputed"}
    op_names = {name for name in ops.__all__ if isinstance(getattr(ops, name), pt.Op)}
    of_packed = {"matmul_back", "matmul_id_back", "stored_sum", "matmul_stored"}
    of_generation = {
        "rounded",
        "matmul_rounded",
        "attention_cells",
        "candidates",
        "draw",
        "short_conv_cells",
        "short_conv_states",
        "ssm_scan_cells",
        "delta_rule_cells",
    }
    of_whole_numbers = {"argmax", "argsort", "count_equal"}
    missing = (
        op_names
        - names
        - of_packed
        - of_generation
        - of_whole_numbers
        - {
            "zero_rows",
            "im2col_back",
            "attention_back_sums",
        }  # the last only in tiles, see test_tiles
    )
    assert not missing


# ---- the plan as data ----------------------------------------------------------------------------------------


def test_a_plan_goes_through_json() -> None:
    for seed in range(5):
        plan = pt.make_plan(pt.place(random_case(seed).graph))
        assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"arenas": [], "buffers": [{}]}', "null"])
def test_what_is_not_a_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a plan"):
        Plan.from_json(text)


def test_a_plan_of_another_graph_is_refused() -> None:
    plan_checks.check_belonging()


def test_a_plan_of_the_same_graph_placed_otherwise_is_refused() -> None:
    placed = small_graph()
    plan = pt.make_plan(pt.place(placed.graph, Target((backends.numpy,))))
    with pytest.raises(pt.GraphError, match="the plan is for"):
        pt.Session().executor(placed, plan)


def test_names_that_collide_do_not_share_bytes() -> None:
    """Buffers are found by name: by those the user gave, numbered ones, and those of copies that place makes."""
    x = pt.input("x", (2, 3))
    exp_node, neg_node = pt.named("a", ops.exp(x)), pt.named("a", ops.neg(x))
    sqr_node = pt.named("a#2", ops.sqr(x))
    transposed, sqrt_node = (
        pt.named("h", ops.permute(x, axes=(1, 0))),
        pt.named("h dense", ops.sqrt(x)),
    )
    outputs = [exp_node, neg_node, sqr_node, ops.silu(transposed), ops.tanh(sqrt_node)]
    graph = pt.Graph({str(i): t for i, t in enumerate(outputs)})
    placed = pt.place(graph)
    assert len(set(placed.names.values())) == len(placed.names)
    pt.verify(pt.make_plan(placed), placed)
    leaf_values = {"x": np.full((2, 3), 4.0, np.float32)}
    checks.assert_all_close(
        checks.run_graph(graph, leaf_values), pt.interpret(graph, leaf_values), "names"
    )


def test_outputs_listed_with_one_name_are_refused() -> None:
    x = pt.input("x", (2, 3))
    with pytest.raises(pt.GraphError, match="a result of add"):
        pt.Graph([ops.add(x, x), ops.add(x, x)])


def test_a_graph_of_many_calls_is_made_in_linear_time() -> None:
    """Eight times the calls run about eight times the lines of Python, although all have one name."""

    def lines(count: int) -> int:
        x = pt.input("x", (2,))
        for _ in range(count):
            x = ops.neg(x)
        run = 0

        def traced(_frame: object, event: str, _value: object) -> object:
            nonlocal run
            run += event == "line"
            return traced

        old_trace = sys.gettrace()
        sys.settrace(traced)
        try:
            pt.place(pt.Graph({"x": x}))
        finally:
            sys.settrace(old_trace)
        return run

    assert lines(1600) < 8.5 * lines(200)


def test_equal_graphs_have_equal_plans() -> None:
    for seed in range(5):
        first_plan, second_plan = (
            pt.make_plan(pt.place(random_case(seed).graph)) for _ in range(2)
        )
        assert first_plan == second_plan


def test_the_peak_is_where_the_most_bytes_are_alive() -> None:
    plan = pt.make_plan(small_graph())
    arena, alive = plan.arena(), plan.peak()
    assert sum(b.nbytes for b in alive) == arena.lower_bound == arena.nbytes
    assert arena.gap == 0
    assert str(arena) in str(plan)
    assert all(b.name in str(plan) for b in plan.buffers)


# ---- the verifier --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reuse", [True, False])
def test_the_verifier_accepts_what_was_planned(reuse: bool) -> None:
    placed = small_graph()
    pt.verify(pt.make_plan(placed, reuse=reuse), placed)


@pytest.mark.parametrize("name", plan_checks.BROKEN)
def test_the_verifier_rejects(name: str) -> None:
    plan_checks.check_rejected(name)


# ---- packing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packer", [pack, best_fit])
def test_packers_keep_buffers_apart(packer: Packer) -> None:
    plan_checks.check_packer(packer)


def test_the_lower_bound_is_the_most_bytes_alive() -> None:
    plan_checks.check_lower_bound()


def test_packing_a_few_buffers_is_best() -> None:
    """First fit in the best of all orders is the optimum; pack finds it on almost every small problem."""
    num_optimal = 0
    for seed in range(40):
        start, end, size = plan_checks.packing_problem(seed, 6)
        orders = (np.array(order) for order in itertools.permutations(range(len(size))))
        min_height = min(
            packing_height(size, first_fit(start, end, size, order)) for order in orders
        )
        packed_height = packing_height(size, pack(start, end, size))
        assert min_height <= packed_height <= packing_height(size, best_fit(start, end, size)), seed
        num_optimal += packed_height == min_height
    assert num_optimal >= 39


def test_nothing_needs_nothing() -> None:
    none = np.zeros(0, np.int64)
    assert lower_bound(none, none, none) == (0, 0)
    assert packing_height(none, none) == 0
    assert pack(none, none, none).shape == best_fit(none, none, none).shape == (0,)


@pytest.mark.parametrize("name", plan_checks.TRACES)
def test_best_fit_is_ggmls(name: str) -> None:
    plan_checks.check_trace(name)
