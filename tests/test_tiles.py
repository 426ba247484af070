"""Blocks in tiles of their rows: the same gradients in less memory, and only where the budget needs them."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

import packtrain as pt
from packtrain.engine import backends, ops, row_tiles
from packtrain.engine.memory_plan import verify
from packtrain.engine.optim import AdamW
from packtrain.engine.row_tiles import in_tiles
from packtrain.models.lora import Lora
from packtrain.planner.checkpointing import uniform_choice
from packtrain.planner.plan_search import find_fastest_shape, smallest
from packtrain.planner.plan_table import choice_texts
from packtrain.planner.step_variants import tile_counts
from packtrain.planner.training_plans import STEP, build_graph, make_plans
from packtrain.workflows.planned_run import resume_shape
from tests import search_checks, tile_checks
from tests.architectures import CONFIGS
from tests.search_checks import LONG, REQUEST

TILED = replace(LONG, num_row_tiles=8)


@pytest.mark.parametrize("is_lora", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_whole_blocks(name, is_lora):
    tile_checks.check_gradients(name, is_lora)


@pytest.mark.parametrize("name", ["llama", "llama experts", "phi3"])
def test_gradients_of_adapters_on_a_quantized_base(name):
    tile_checks.check_gradients(name, is_lora=True, dtype="q4_K")


def test_plans_of_tiles_are_verified_inside_and_outside():
    plans = make_plans(TILED, AdamW())
    for plan, placed in zip(plans.plans.values(), plans.placed_graphs.values(), strict=True):
        verify(plan, placed)
    assert (
        tile_checks.check_programs(plans.placed_graphs[STEP].graph) == 4 * TILED.config.block_count
    )


def test_a_tile_needs_a_share_of_the_memory():
    """Of the inner values; residual stream, keys and values are those of all rows."""
    shape = replace(LONG, seq_len=2048, keep=uniform_choice(LONG.config.block_count, ()))
    untiled, *tiled = (
        make_plans(replace(shape, num_row_tiles=count), AdamW()).arena_nbytes
        for count in (1, 8, 32)
    )
    assert untiled > tiled[0] > tiled[1]


def test_a_tile_adds_gradients_of_all_keys_to_those_of_other_tiles_in_place():
    """Gradients of a tile's own for all keys and values took as much memory again, of long contexts most of it."""
    config = replace(LONG.config, lora=Lora((("blk.*", 4),)))
    plans = make_plans(replace(TILED, config=config, seq_len=2048), AdamW())
    backward = [
        program
        for program in tile_checks.programs(plans.placed_graphs[STEP].graph)
        if any(step.op is ops.attention_back_sums for step in program.placed.steps)
    ]
    kv_nbytes = 4 * 2048 * config.kv_heads_of(0) * config.width_of(0)
    assert len(backward) == config.block_count
    for program in backward:
        steps = program.placed.steps
        assert not any(step.op is ops.attention_back for step in steps)
        sums = [step.results[0] for step in steps if step.op is ops.accumulate]
        assert all(total.spec.nbytes < kv_nbytes for total in sums)


def test_a_search_takes_tiles_only_where_the_budget_needs_them():
    untiled, tiled = (REQUEST.peak_nbytes(make_plans(shape, AdamW())) for shape in (LONG, TILED))
    assert find_fastest_shape(LONG, REQUEST.with_limit(untiled)).shape.num_row_tiles == 1
    smallest_shape = smallest(LONG, REQUEST)
    min_nbytes = REQUEST.peak_nbytes(make_plans(smallest_shape, AdamW()))
    answer = find_fastest_shape(LONG, REQUEST.with_limit(min_nbytes))
    assert min_nbytes < tiled < untiled
    assert (
        answer.is_within_limits and answer.shape.num_row_tiles == smallest_shape.num_row_tiles == 8
    )
    plans = make_plans(answer.shape, AdamW())
    assert REQUEST.peak_nbytes(plans) <= min_nbytes
    assert "blocks in 8 tiles of their rows" in choice_texts(plans)


@pytest.mark.parametrize("context", [4, 128])
def test_a_refusal_of_tiles_names_a_context_that_fits(context):
    search_checks.check_suggested_context(LONG, context)


@pytest.mark.parametrize(
    "request_", [replace(REQUEST, recompute="blocks"), replace(REQUEST, target=backends.Target((backends.numpy,)))]
)  # fmt: skip
def test_tiles_are_of_the_cpu_and_of_recompute_auto(request_):
    assert smallest(LONG, request_).num_row_tiles == 1


def test_tiles_have_equally_many_rows_and_no_dropout():
    assert tile_counts(LONG) == [1, 2, 8] and tile_counts(replace(LONG, seq_len=128)) == [1, 2]
    assert tile_counts(replace(LONG, seq_len=500)) == [1]
    for lora in (replace(tile_checks.LORA, dropout=0.1), replace(tile_checks.LORA, aware=True)):
        assert tile_counts(replace(LONG, config=replace(LONG.config, lora=lora))) == [1]
    x = pt.input("x", (1, 10, 4))
    with pytest.raises(pt.GraphError, match="a multiple of 3"):
        in_tiles(lambda tiles, wholes: [pt.sqr(tiles[0])], [x], {}, 3)


def test_a_resumed_run_keeps_its_tiles():
    """They fix the order of additions; runs that began before there were tiles have none."""
    about = {"rows": 1, "chunk": 64, "layered": False, "tiles": 8}
    assert resume_shape(LONG, about).num_row_tiles == 8
    fixed = replace(REQUEST.with_limit(1 << 20), fixed=True)
    assert find_fastest_shape(resume_shape(LONG, about), fixed).shape.num_row_tiles == 8
    del about["tiles"]
    assert resume_shape(TILED, about).num_row_tiles == 1
    assert build_graph(STEP, LONG, AdamW()).graph.calls


def test_adding_to_gradients_allocates_no_tile():
    x = pt.input("x", (1, 4, 1 << 20))
    (y,) = in_tiles(lambda tiles, wholes: [pt.sqr(tiles[0])], [x], {}, 4)
    attrs = {"body": y.call.attrs["body"], "dy_indices": (0,), "dx_indices": (0,)}
    (work,) = row_tiles.tiled_back.workspaces["cpu"](x, x, x, **attrs)
    acc, dy, value = np.ones((3, *x.shape), np.float32)
    kernel, arena = row_tiles.tiled_back.kernels["cpu"].run, np.empty(work.shape, np.float32)
    for _ in range(2):  # the first call plans and compiles
        tracemalloc.start()
        kernel(acc, acc, dy, value, **attrs, work=[arena])
        peak_nbytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert (acc == 5).all() and peak_nbytes < value[0, 0].nbytes // 2
