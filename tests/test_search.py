"""What a search knows of ways to run a block before it builds them, and that it finds no worse for it."""

import gc
import os
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from packtrain.engine import ops, row_tiles
from packtrain.engine.backends import HOST
from packtrain.engine.graph import Graph
from packtrain.engine.optim import AdamW
from packtrain.models.lora import Lora
from packtrain.planner import choice_cache, training_plans
from packtrain.planner.block_extrapolation import blocks_match
from packtrain.planner.checkpointing import RecomputeChoice, uniform_choice
from packtrain.planner.cost_model import BackendRates
from packtrain.planner.plan_request import PlanRequest
from packtrain.planner.plan_search import (
    FREE,
    SLACK,
    PlanSearch,
    find_fastest_shape,
    unlimited,
)
from packtrain.planner.step_shape import BaseModel
from packtrain.planner.training_plans import APPLY, MEASURE, build_graph, make_plans
from tests.search_checks import (
    CONFIG,
    REQUEST,
    SHAPE,
    check_alone,
    check_smallest,
    fastest_or_smallest,
    fresh_chain,
    smallest_planned,
)

FORMS = [
    SHAPE,
    replace(SHAPE, num_micro_batches=2),
    replace(SHAPE, num_micro_batches=2, layered=True),
]
FORMS += [replace(form, two_passes=True) for form in (FORMS[0], FORMS[2])]
TWO_PASS_SHAPES = [replace(FORMS[0], num_two_pass_blocks=count) for count in (1, 4, 6)] + [
    replace(FORMS[2], num_two_pass_blocks=4)
]
SAVED = replace(SHAPE, config=replace(SHAPE.config, saved="bf16"))
FORMS += [SAVED, replace(SHAPE, num_row_tiles=2)]


@pytest.mark.parametrize("form", FORMS)
def test_ways_take_what_they_should_at_least(form):
    """Seconds and calls are right but for a cut that is computed again first; bytes are of a few rows less precise."""
    block = fresh_chain(form).block
    bounds = {option.keep: option for option in block.options}
    assert block.measure(bounds) and not block.measure(bounds)
    for option in block.options:
        bound = bounds[option.keep]
        assert bound.saved == option.saved
        assert bound.work <= 1.06 * option.work
        assert bound.seconds <= option.seconds * (1 + 1e-9) and bound.calls <= option.calls
        if all(rank == 0 for _, rank in option.keep):
            assert bound.seconds == pytest.approx(option.seconds) and bound.calls == option.calls
    assert block.min_work_nbytes <= min(option.work for option in block.options)


@pytest.mark.parametrize("form", FORMS)
def test_ways_take_together_what_each_takes_alone(form):
    check_alone(form)


@pytest.mark.parametrize("form", FORMS[2:4])
def test_a_few_ways_that_are_measured_do_as_well_as_all(form):
    """And nothing is found that is faster than what was known before anything was measured."""
    baseline_chain = fresh_chain(form)
    for budget in np.linspace(
        smallest_planned(baseline_chain).nbytes, baseline_chain.plan_choice(None).nbytes, 4
    ).astype(int)[1:-1]:
        partial_chain, exhaustive_chain, nbytes = fresh_chain(form), fresh_chain(form), int(budget)
        bound = partial_chain.seconds_bound(int(nbytes * (1 + SLACK)))
        exhaustive_chain.block.measure(exhaustive_chain.block.strategies)
        best_draft, exhaustive_draft = (
            partial_chain.fastest_within(nbytes),
            exhaustive_chain.fastest_within(nbytes),
        )
        assert best_draft is not None and exhaustive_draft is not None
        assert (
            bound <= exhaustive_draft.seconds * 1.001
            and best_draft.seconds <= exhaustive_draft.seconds * 1.001
        )
        assert (
            len(partial_chain.block._measured_options)
            < len(exhaustive_chain.block._measured_options) / 2
        )


def test_a_bound_lets_nothing_be_built_that_is_too_slow():
    blocks = fresh_chain(FORMS[3])
    nbytes = (smallest_planned(blocks).nbytes + blocks.plan_choice(None).nbytes) // 2
    built = set(blocks.planned_choices)
    blocks.fastest_within(nbytes, blocks.seconds_bound(nbytes) * 0.99)
    assert set(blocks.planned_choices) == built


@pytest.mark.parametrize("form", FORMS[:3])
def test_without_a_limit_auto_recomputes_what_is_nearly_free(form):
    form, search = replace(form, micro_batch_size=16), PlanSearch(REQUEST)
    full_draft, cheap_draft = search.draft(form), search.draft(search.with_free_recompute(form))
    assert cheap_draft.shape.keep is not None and cheap_draft.nbytes < full_draft.nbytes * 0.99
    assert full_draft.seconds < cheap_draft.seconds <= full_draft.seconds * (1 + FREE)
    none = replace(REQUEST, recompute="none")
    assert unlimited(form, none) == form and unlimited(form, REQUEST) == cheap_draft.shape


def test_an_equal_run_does_not_search_again(tmp_path, monkeypatch):
    """A run that differs does, in model, settings, rates or files of the package, and so does one after damage."""
    monkeypatch.setattr(choice_cache, "cache_root", lambda: tmp_path)
    form, searched = replace(SHAPE, micro_batch_size=16), []

    def search(shape, request):
        searched.append(shape)
        return unlimited(shape, request)

    def chosen(shape=form, request=REQUEST):
        searches_before = len(searched)
        answer = choice_cache.with_saved_choice(shape, request, search)
        assert answer == unlimited(shape, request)
        return len(searched) - searches_before

    none, slow = (
        replace(REQUEST, recompute="none"),
        replace(REQUEST, rates=BackendRates(3e11, 1e10)),
    )
    shorter = replace(form, seq_len=form.seq_len // 2)
    cases = (form, REQUEST), (form, none), (form, slow), (shorter, REQUEST)
    assert [chosen(*case) for case in cases * 2] == [1] * 4 + [0] * 4
    assert chosen(request=replace(REQUEST, baseline_nbytes=1 << 30)) == 0
    (tmp_path / "choices.json").write_text(
        '{"' + choice_cache.choice_key(form, REQUEST) + '": [3]}'
    )
    assert chosen() == 1 and chosen() == 0
    monkeypatch.setattr(choice_cache, "MAX_CHOICES", 2)
    assert [chosen(*case) for case in cases] == [0, 1, 1, 1]
    assert chosen() == 1  # the oldest went first
    real_stat, source = os.stat, choice_cache.__file__
    edited = SimpleNamespace(st_size=os.stat(source).st_size, st_mtime_ns=1)
    monkeypatch.setattr(
        os, "stat", lambda path, **kw: edited if path == source else real_stat(path, **kw)
    )
    assert chosen() == 1


def test_what_takes_time_to_recompute_is_kept():
    """Where each call takes long, nothing is free."""
    slow = PlanRequest(AdamW(), BackendRates(1e11, 1e10, call=1.0))
    assert unlimited(SHAPE, slow) == SHAPE


def test_more_time_keeps_no_more():
    block = fresh_chain(SHAPE).block
    places = set(block.read)
    saved_places = [
        set(block.places(share * block.forward_seconds)) for share in (0, 0.01, 0.1, 0.5, 1)
    ]
    assert (
        saved_places[0] == places and saved_places[-1] == set() < saved_places[2] < saved_places[0]
    )
    assert all(smaller_set <= larger_set for larger_set, smaller_set in pairwise(saved_places))


@pytest.mark.parametrize("form", FORMS[3:5])
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_draft_of_two_passes_recomputes_in_both(form, recomputed):
    keep = uniform_choice(CONFIG.block_count, ()) if recomputed else None
    shape = replace(form, keep=keep)
    drafted, planned = PlanSearch(REQUEST).draft(shape), make_plans(shape, REQUEST.optimizer)
    assert planned.plans[MEASURE].arena().nbytes <= planned.plans[APPLY].arena().nbytes
    assert planned.nbytes <= drafted.nbytes <= planned.nbytes * 1.06


@pytest.mark.parametrize("form", TWO_PASS_SHAPES)
@pytest.mark.parametrize("keep", [None, uniform_choice(CONFIG.block_count, ())])
def test_a_draft_of_blocks_that_go_back_twice_recomputes_them_twice(form, keep):
    shape, once = replace(form, keep=keep), replace(form, num_two_pass_blocks=0, keep=keep)
    drafted, planned = PlanSearch(REQUEST).draft(shape), make_plans(shape, REQUEST.optimizer)
    assert planned.nbytes <= drafted.nbytes <= planned.nbytes * 1.06
    assert drafted.seconds == pytest.approx(planned.step_seconds(REQUEST.rates), rel=0.02)
    num_recomputed, num_once = (
        sum(
            call.phase == "recomputed" and call.op is ops.matmul
            for call in make_plans(s, AdamW()).placed_graphs["step"].graph.calls
        )
        for s in (shape, once)
    )
    count = CONFIG.block_count
    assert num_recomputed == num_once * (count + form.num_two_pass_blocks) // count and (
        num_once > 0
    ) == (keep is not None)


def test_between_one_pass_and_two_whole_ones_some_blocks_go_back_twice():
    """The more do, the longer it takes, and the fewer bytes; two whole passes take longer."""
    one_pass_form, *two_pass_forms, full_form = FORMS[0], *TWO_PASS_SHAPES[:3], FORMS[3]
    search = PlanSearch(REQUEST)
    seconds = [
        search.rough_draft(form).seconds for form in (one_pass_form, *two_pass_forms, full_form)
    ]
    assert all(left < right for left, right in pairwise(seconds))
    recomputing_forms = [
        replace(form, keep=uniform_choice(CONFIG.block_count, ()))
        for form in (one_pass_form, *two_pass_forms)
    ]
    drafts = [search.draft(form) for form in recomputing_forms]
    assert all(left.nbytes > right.nbytes for left, right in pairwise(drafts))
    best_drafts = [fastest_or_smallest(search, one_pass_form, draft.nbytes) for draft in drafts]
    for best, draft in zip(best_drafts, drafts, strict=True):
        assert best.nbytes <= draft.nbytes and best.seconds <= draft.seconds
    assert best_drafts[-1].shape.num_two_pass_blocks


def test_the_smallest_choice_takes_what_the_search_says():
    check_smallest(replace(SHAPE, max_norm=None))


def test_embeddings_are_looked_up_again_unless_a_second_pass_follows_their_update():
    keep, count = uniform_choice(CONFIG.block_count, ()), CONFIG.block_count
    lora = replace(CONFIG, lora=Lora((("blk.*", 4),), 0, 4.0))
    for shape, num_lookups in (
        (replace(SHAPE, keep=keep), 2),
        (replace(SHAPE, keep=None), 1),
        (replace(SHAPE, keep=keep, two_passes=True), 2),
        (replace(SHAPE, keep=keep, num_two_pass_blocks=count), 1),
        (replace(SHAPE, keep=keep, config=lora, base=BaseModel(())), 2),
        (replace(SHAPE, keep=uniform_choice(2, ()), base=BaseModel((), num_trained_blocks=2)), 1),
    ):
        calls = build_graph(training_plans.block_graph(shape), shape, AdamW()).graph.calls
        assert sum(call.op is ops.get_rows for call in calls) == num_lookups


@pytest.mark.parametrize("num_two_pass_blocks", [2, 4])
def test_what_goes_back_twice_is_kept_as_well_as_any_of_its_blocks_could_be(num_two_pass_blocks):
    """Against all ways in which each block keeps all of what is read, half of it, or nothing."""
    form = replace(SHAPE, num_two_pass_blocks=num_two_pass_blocks)
    blocks = PlanSearch(REQUEST).chain(form)
    read = blocks.block.read
    kinds = [tuple((place, 0) for place in places) for places in (read, read[::2], ())]
    stream, count = (0,) * (CONFIG.block_count + 1), CONFIG.block_count
    all_drafts = [
        blocks.plan_choice(RecomputeChoice(stream, (*first, *last)))
        for first in combinations_with_replacement(kinds, num_two_pass_blocks)
        for last in combinations_with_replacement(kinds, count - num_two_pass_blocks)
    ]
    for limit in np.linspace(
        smallest_planned(blocks).nbytes, blocks.plan_choice(None).nbytes, 6
    ).astype(int)[1:]:
        chain = PlanSearch(REQUEST).chain(form)
        best_draft = chain.fastest_within(int(limit))
        best = min(draft.seconds for draft in all_drafts if draft.nbytes <= limit)
        assert best_draft is not None and best_draft.seconds <= best * 1.001


def test_two_passes_take_at_least_what_one_takes_without_its_gradients():
    search = PlanSearch(REQUEST)
    for form in (*FORMS, *TWO_PASS_SHAPES):
        min_draft = search.smallest_of([form])
        assert search._min_nbytes(form) <= min_draft.nbytes


def graphs_alive() -> int:
    """Graphs in memory but for those of tiles, which stay."""
    num_tile_graphs = row_tiles._program.cache_info().currsize
    return sum(isinstance(tracked, Graph) for tracked in gc.get_objects()) - num_tile_graphs


def test_a_search_keeps_no_graph_but_the_last_short_one():
    gc.collect()
    search, before = PlanSearch(REQUEST), graphs_alive()
    search.smallest_draft(SHAPE)
    fastest_or_smallest(search, SHAPE, int(0.7 * search.rough_draft(SHAPE).nbytes))
    chains = {
        id(chain.block): chain for chain in search._block_chains.values() if chain.block.__dict__
    }
    gc.collect()
    assert len(chains) > 1 and graphs_alive() - before <= 1


def test_a_search_frees_each_graph_before_it_builds_the_next(monkeypatch):
    def counting_build(*args):
        alive.append(graphs_alive() - before)
        return build_graph(*args)

    shape = replace(SHAPE, base=BaseModel((), ("blk.1.ffn_*", "blk.3.ffn_*")))
    search, alive = PlanSearch(REQUEST), list[int]()
    assert not blocks_match(shape)
    gc.collect()
    before = graphs_alive()
    monkeypatch.setattr(training_plans, "build_graph", counting_build)
    gc.disable()
    try:
        search.smallest_draft(shape)
    finally:
        gc.enable()
    assert len(alive) > 10 and max(alive) <= 2


def test_a_search_afresh_knows_of_its_chains_what_short_ones_say_and_no_more():
    search = PlanSearch(REQUEST)
    fastest_or_smallest(search, SHAPE, int(0.7 * search.rough_draft(SHAPE).nbytes))
    for shape in (SHAPE, replace(SHAPE, chunk=16, num_two_pass_blocks=2)):
        search.chain(shape).plan_choice(None)
        search.chain(shape).block.measure(search.chain(shape).block.strategies)
        old, new = search.chain(shape), search.with_fresh_chains().chain(shape)
        assert (
            old.planned_choices
            and old.block._measured_options
            and not new.planned_choices
            and not new.block._measured_options
        )
        assert new.block._middle is old.block._middle and new.head_work == old.head_work
        assert new.smallest_choice == PlanSearch(REQUEST).chain(shape).smallest_choice


def test_a_context_far_too_long_is_answered_with_one_that_fits():
    long = replace(SHAPE, config=replace(CONFIG, context_length=1 << 20), seq_len=1 << 20)
    min_nbytes = PlanSearch(REQUEST).smallest_of([SHAPE]).nbytes
    limited_request = replace(REQUEST, limits={HOST: 2 * min_nbytes})
    said = PlanSearch(limited_request).suggest_change(long)
    context = int(said.removeprefix("it would fit with --ctx "))
    assert context >= SHAPE.seq_len
    assert find_fastest_shape(replace(long, seq_len=context), limited_request).is_within_limits
