"""`--memory` for every architecture, and for every way to train: planned, refused with a minimum, run inside it."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import pytest

from packtrain.dtypes import DTYPES
from packtrain.engine.memory_plan import verify
from packtrain.engine.optim import AdamW
from packtrain.engine.placement import place
from packtrain.models.lora import Lora
from packtrain.planner.block_extrapolation import blocks_match, num_reached_blocks, with_num_blocks
from packtrain.planner.checkpointing import uniform_choice
from packtrain.planner.checkpointing.middle_blocks import backward_steps
from packtrain.planner.cost_model import BackendRates
from packtrain.planner.drafts import DraftEstimator
from packtrain.planner.plan_request import PlanRequest
from packtrain.planner.plan_search import PlanSearch, find_fastest_shape
from packtrain.planner.step_shape import BaseModel, StepShape
from packtrain.planner.training_plans import STEP, build_graph, leaves
from tests.architectures import CONFIGS
from tests.search_checks import fastest_or_smallest

REQUEST = PlanRequest(AdamW(), BackendRates(1e11, 1e10))
MIXERS = ("attn_*", "ssm_in", "shortconv.in_proj")
LORA = Lora((*((f"blk.*.{name}.weight", 4) for name in MIXERS), ("blk.*.ffn_up.weight", 4)), 0, 8.0)
BASES: Mapping[str, BaseModel] = {
    "full": BaseModel(()),
    "frozen": BaseModel((), ("token_embd*", "blk.0.*", "blk.*.ffn_down*")),
    "head": BaseModel((), ("token_embd*", "blk.*")),
    "last": BaseModel((), num_trained_blocks=1),
}


def shape_of(name: str, kind: str) -> StepShape:
    config, base = CONFIGS[name], BASES.get(kind, BaseModel(()))
    if kind.startswith("lora"):
        config = replace(config, lora=replace(LORA, last=int(kind == "lora last")))
    return StepShape(config, 2, 32, 1, 1.0, base=base)


@pytest.mark.parametrize("kind", ["full", "frozen", "last", "lora", "lora last"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_block_that_is_reached_has_its_backward_steps_in_turn(name, kind):
    shape = shape_of(name, kind)
    count = num_reached_blocks(shape)
    built = build_graph(STEP, replace(shape, keep=uniform_choice(count, ())), AdamW())
    assert len(built.stream) == count + 1
    spans = backward_steps(place(built.graph), built, 1)
    assert set(range(count)) - set(spans) <= {0}
    assert all(later[1] <= sooner[0] for sooner, later in pairwise(spans[i] for i in sorted(spans)))
    short = with_num_blocks(shape, 3)
    sources = 2 if short.config.own_kv else 0
    assert num_reached_blocks(short) == 3 == short.config.block_count - sources
    assert blocks_match(short) or len({*short.config.attending}) == 2 or short.config.differing


def test_a_shorter_model_trains_what_the_longer_does():
    kinds = {"blk.1.attn_q.weight", "blk.1.ffn_norm.weight"}
    frozen = ("blk.0.*", "blk.*.attn_k.*", "blk.*.ffn_gate*", "token_embd*")
    shape = shape_of("smollm3", "full")
    shape = replace(shape, base=BaseModel((), frozen))
    assert num_reached_blocks(shape) == 4 and blocks_match(shape)
    short = with_num_blocks(shape, 2, below=1)
    names = {leaf.label for leaf in leaves(short.config, short.base)[1]}
    assert names >= kinds and num_reached_blocks(short) == 2 and "output_norm.weight" in names
    assert not any(name.startswith(("blk.0.", "token_embd")) or "attn_k" in name for name in names)


@pytest.mark.parametrize("kind", ["full", "frozen", "head", "last", "lora", "lora last"])
def test_blocks_with_norms_behind_them_are_computed_again(kind):
    """Their stream values have no name, and with a part frozen some have no gradient."""
    shape = shape_of("gemma3", kind)
    full_nbytes = REQUEST.peak_nbytes(REQUEST.make_plans(shape))
    refused = find_fastest_shape(shape, REQUEST.with_limit(1 << 20))
    min_nbytes = REQUEST.peak_nbytes(REQUEST.make_plans(refused.shape))
    assert not refused.is_within_limits and min_nbytes <= full_nbytes
    for limit in ((full_nbytes + min_nbytes) // 2, min_nbytes):
        answer = find_fastest_shape(shape, REQUEST.with_limit(limit))
        assert (
            answer.is_within_limits
            and REQUEST.peak_nbytes(REQUEST.make_plans(answer.shape)) <= limit
        )


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_pattern_for_each_of_a_few_blocks_goes_on_in_the_longer_chains_that_are_measured(blocks):
    shape = shape_of("gemma3 linear", "full")
    short_config = replace(shape.config, block_count=blocks, window_pattern=(True, False)[:blocks])
    shape = replace(shape, config=short_config)
    assert not find_fastest_shape(shape, REQUEST.with_limit(1 << 20)).is_within_limits
    assert with_num_blocks(shape, 5).config.window_pattern == ((True, False)[:blocks] * 5)[:5]


# ---- the matrix: every form of a block, every way to train it, every budget

KIND_ADVICE = {
    "full": "leave out --full",
    "frozen": "leave out --full",
    "last": "leave out --full",
    "lora": "--lora-rank",
    "lora last": "--lora-rank",
}


class BudgetRange(NamedTuple):
    """What the budgets of one form and way have in common: bytes with everything kept, and the fewest."""

    shape: StepShape
    budget_search: PlanSearch
    full_nbytes: int
    min_nbytes: int


@lru_cache(maxsize=1)
def budget_range(name: str, kind: str) -> BudgetRange:
    shape = shape_of(name, kind)
    config = replace(shape.config, block_count=3)
    shape = replace(shape, config=config, micro_batch_size=1, seq_len=128, max_norm=None)
    budget_search = PlanSearch(REQUEST)
    smallest = fastest_or_smallest(budget_search, shape, 1 << 20)
    return BudgetRange(
        shape, budget_search, REQUEST.peak_nbytes(REQUEST.make_plans(shape)), smallest.nbytes
    )


def matrix_cells() -> Iterator[tuple[str, str, str]]:
    """Every architecture in two ways, by turns, without a limit and with the smallest; with others in one of them.

    In all ways with PACKTRAIN_MATRIX=whole in the environment, in twice the time.
    """
    is_full = os.environ.get("PACKTRAIN_MATRIX") == "whole"
    for number, name in enumerate(CONFIGS):
        for index, kind in enumerate(KIND_ADVICE):
            turn = (index - number) % len(KIND_ADVICE)
            if is_full or turn in (0, 2):
                for budget in ("none", "smallest", *(("tight", "too small") if not turn else ())):
                    yield name, kind, budget


@pytest.mark.parametrize(("name", "kind", "budget"), list(matrix_cells()))
def test_every_architecture_within_every_budget(name, kind, budget):
    """What is planned takes what was searched for, and 5 % below the smallest budget nothing is found."""
    shape, budget_search, full_nbytes, min_nbytes = budget_range(name, kind)
    assert min_nbytes < full_nbytes
    limits = {"none": full_nbytes, "tight": (full_nbytes + min_nbytes) // 2, "smallest": min_nbytes}
    limit = limits.get(budget, int(0.95 * min_nbytes))
    best = fastest_or_smallest(budget_search, shape, limit)
    plans = REQUEST.make_plans(best.shape)
    for plan, placed in zip(plans.plans.values(), plans.placed_graphs.values(), strict=True):
        verify(plan, placed)
    assert REQUEST.peak_nbytes(plans) <= best.nbytes * 1.01
    assert (best.shape == shape) == (budget == "none")
    assert (REQUEST.peak_nbytes(plans) <= limit) == (budget != "too small")


@pytest.mark.parametrize("kind", KIND_ADVICE)
def test_a_refusal_of_every_way_says_what_would_do(kind):
    refused = find_fastest_shape(shape_of("phi3", kind), REQUEST.with_limit(1 << 20))
    assert not refused.is_within_limits and KIND_ADVICE[kind] in refused.suggested_change


def test_blocks_without_rope_keep_in_its_place_what_rope_would_have_turned():
    shape = replace(shape_of("smollm3", "full"), micro_batch_size=1, seq_len=128, max_norm=None)
    full_nbytes, budget_search = REQUEST.peak_nbytes(REQUEST.make_plans(shape)), PlanSearch(REQUEST)
    limit = (full_nbytes + fastest_or_smallest(budget_search, shape, 1 << 20).nbytes) // 2
    best = fastest_or_smallest(budget_search, shape, limit)
    assert best.shape.keep is not None and any(best.shape.keep.inner)
    assert REQUEST.peak_nbytes(REQUEST.make_plans(best.shape)) <= limit


def test_a_shorter_mixture_has_one_dense_block_at_most():
    """Of those that are reached, and blocks keep the types of blocks of their kind."""
    config = replace(CONFIGS["glm4moe"], block_count=6, leading_dense_block_count=3)
    dense = [(f"blk.{i}.ffn_down.weight", DTYPES["q8_0"]) for i in range(3)]
    experts = [(f"blk.{i}.ffn_down_exps.weight", DTYPES["q4_0"]) for i in range(3, 6)]
    shape = StepShape(config, 2, 32, 1, 1.0, base=BaseModel((*dense, *experts)))
    assert not blocks_match(shape)
    short = with_num_blocks(shape, 3)
    assert (
        short.config.leading_dense_block_count == 1
        and short.base is not None
        and blocks_match(short)
    )
    assert {n: t for n, t in short.base.types if "down" in n} == dict(
        [dense[0], *((f"blk.{i}.ffn_down_exps.weight", DTYPES["q4_0"]) for i in (1, 2))]
    )
    assert with_num_blocks(shape, 1).config.leading_dense_block_count == 0
    shape = replace(
        shape, base=BaseModel((*dense, *experts), ("token_embd*", "blk.0.*", "blk.1.*"))
    )
    assert blocks_match(shape) and num_reached_blocks(shape) == 4
    short = with_num_blocks(shape, 2, below=1)
    assert (
        short.config.leading_dense_block_count == 2
        and num_reached_blocks(short) == 2
        and blocks_match(short)
    )


def test_estimates_of_a_mixture_with_a_dense_block_are_near_its_plans():
    config = replace(CONFIGS["glm4moe"], block_count=8)
    shape = StepShape(config, 2, 32, 1, 1.0, base=BaseModel(()))
    drafts = DraftEstimator(REQUEST)
    estimate = drafts.estimate(shape)
    exact = drafts._probe(shape)
    assert estimate.calls == exact.calls and estimate.leaves == exact.leaves
    assert abs(estimate.arena - exact.arena) < 0.01 * exact.arena
