"""`--memory` for every architecture and every way to train it: planned, refused with a minimum, run inside it."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest

from packtrain.cost import Rates
from packtrain.models.lora import Lora
from packtrain.optim import AdamW
from packtrain.place import place
from packtrain.recompute import uniform
from packtrain.recompute.block import backward_steps
from packtrain.train.depth import even, reached, with_blocks
from packtrain.train.parts import Setting
from packtrain.train.plans import STEP, Base, Shape, build, leaves
from packtrain.train.search import search
from tests.architectures import CONFIGS

SETTING = Setting(AdamW(), Rates(1e11, 1e10), 0)
LORA = Lora((("blk.*.attn_*.weight", 4), ("blk.*.ffn_up.weight", 4)), 0, 8.0)
BASES: Mapping[str, Base] = {
    "full": Base(()),
    "frozen": Base((), ("token_embd*", "blk.0.*", "blk.*.ffn_down*")),
    "head": Base((), ("token_embd*", "blk.*")),
    "last": Base((), last=1),
}


def shape_of(name: str, kind: str) -> Shape:
    config, base = CONFIGS[name], BASES.get(kind, Base(()))
    if kind.startswith("lora"):
        config = replace(config, lora=replace(LORA, last=int(kind == "lora last")))
    return Shape(config, 2, 32, 1, 1.0, base=base)


@pytest.mark.parametrize("kind", ["full", "frozen", "last", "lora", "lora last"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_block_that_is_reached_has_its_backward_steps_in_turn(name, kind):
    shape = shape_of(name, kind)
    count = reached(shape)
    built = build(STEP, replace(shape, keep=uniform(count, ())), AdamW())
    assert len(built.stream) == count + 1
    spans = backward_steps(place(built.graph), built, 1)
    assert set(range(count)) - set(spans) <= {0}
    assert all(later[1] <= sooner[0] for sooner, later in pairwise(spans[i] for i in sorted(spans)))
    short = with_blocks(shape, 3)
    assert even(short) and reached(short) == 3 == short.config.block_count


def test_a_shorter_model_trains_what_the_longer_does():
    kinds = {"blk.1.attn_q.weight", "blk.1.ffn_norm.weight"}
    frozen = ("blk.0.*", "blk.*.attn_k.*", "blk.*.ffn_gate*", "token_embd*")
    shape = shape_of("smollm3", "full")
    shape = replace(shape, base=Base((), frozen))
    assert reached(shape) == 4 and even(shape)
    short = with_blocks(shape, 2, below=1)
    names = {leaf.label for leaf in leaves(short)[1]}
    assert names >= kinds and reached(short) == 2 and "output_norm.weight" in names
    assert not any(name.startswith(("blk.0.", "token_embd")) or "attn_k" in name for name in names)


@pytest.mark.parametrize("kind", ["full", "frozen", "head", "last", "lora", "lora last"])
def test_blocks_with_norms_behind_them_are_computed_again(kind):
    """Their stream values have no name, and with a part frozen some have no gradient."""
    shape = shape_of("gemma3", kind)
    whole = SETTING.total(SETTING.plans(shape))
    refused = search(shape, "auto", SETTING, 1 << 20)
    least = SETTING.total(SETTING.plans(refused.shape))
    assert not refused.fits and least <= whole
    for limit in ((whole + least) // 2, least):
        answer = search(shape, "auto", SETTING, limit)
        assert answer.fits and SETTING.total(SETTING.plans(answer.shape)) <= limit


FORMS = ("llama biased", "llama experts", "phi3")
WAYS = {
    "full": "leave out --full",
    "frozen": "leave out --full",
    "last": "leave out --full",
    "lora": "--lora-rank",
}


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_block_fits_from_its_smallest_budget_on_and_not_below(name, kind):
    """No budget, a tight one, the smallest, and one too small; what is found as the least may be 2 % above it."""
    shape = shape_of(name, kind)
    config = replace(shape.config, block_count=min(shape.config.block_count, 3))
    shape = replace(shape, config=config, rows=1, max_norm=None)
    whole = SETTING.total(SETTING.plans(shape))
    assert search(shape, "auto", SETTING, whole).shape == shape
    refused = search(shape, "auto", SETTING, 1 << 20)
    least = SETTING.total(SETTING.plans(refused.shape))
    assert not refused.fits and least < whole and WAYS[kind] in refused.change
    for limit in ((whole + least) // 2, least):
        answer = search(shape, "auto", SETTING, limit)
        assert answer.fits and SETTING.total(SETTING.plans(answer.shape)) <= limit
    assert not search(shape, "auto", SETTING, int(least * 0.95)).fits
