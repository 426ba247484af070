"""Activations saved in bf16: fewer bytes for the backward pass, and the same bits whatever is recomputed."""

from dataclasses import replace

import numpy as np
import pytest

from packtrain import Graph, input, kernels, place
from packtrain.devtools.check.check_cases import run_graph
from packtrain.dtypes import bf16
from packtrain.engine import backends, ops
from packtrain.engine.optim import AdamW
from packtrain.models.lora import Lora
from packtrain.planner.checkpointing import spaced_choice, uniform_choice
from packtrain.planner.plan_search import PlanSearch, find_fastest_shape
from packtrain.planner.step_shape import BaseModel, StepShape
from packtrain.planner.training_plans import EVALUATE, STEP, build_graph, make_plans
from packtrain.training.training_engine import TrainingEngine
from tests.architectures import CONFIGS
from tests.models import (
    CONFIG,
    bind_graph,
    gradient_graph,
    relative_error,
    same_bits,
    seeded_batch,
    seeded_weights,
)
from tests.search_checks import REQUEST
from tests.search_checks import SHAPE as LARGE

SAVED = replace(CONFIG, saved="bf16")
SHAPE = StepShape(SAVED, 2, 17, max_norm=1.0)
COUNT = CONFIG.block_count


def in_bf16(shape: StepShape) -> StepShape:
    return replace(shape, config=replace(shape.config, saved="bf16"))


def after_steps(shape: StepShape) -> dict[str, np.ndarray]:
    """Losses and weights of three steps."""
    engine = TrainingEngine(make_plans(shape, AdamW()), AdamW())
    engine.session.set(seeded_weights(CONFIG))
    batches = [seeded_batch(CONFIG, shape.micro_batch_size, shape.seq_len, at) for at in range(3)]
    losses = [engine.step([fed], at + 1, 1e-2).loss for at, fed in enumerate(batches)]
    return {"losses": np.array(losses)} | {n: engine.session.get(n) for n in seeded_weights(CONFIG)}


@pytest.mark.parametrize(
    "other",
    [
        replace(SHAPE, keep=uniform_choice(COUNT, ())),
        replace(SHAPE, keep=uniform_choice(COUNT, range(3, 30, 4))),
        replace(SHAPE, keep=spaced_choice(COUNT, 2)),
        replace(SHAPE, two_passes=True),
        replace(SHAPE, num_two_pass_blocks=2),
        replace(SHAPE, keep=uniform_choice(COUNT, ()), num_two_pass_blocks=1),
    ],
)
def test_what_is_recomputed_changes_no_bit(other):
    graph = build_graph("apply" if other.num_passes > 1 else STEP, other, AdamW()).graph
    assert any(call.phase == "recomputed" for call in graph.calls) == (other.keep is not None)
    assert same_bits(after_steps(other), after_steps(SHAPE))


def test_gradients_are_near_those_of_f32_and_not_the_same():
    f32_gradients, bf16_gradients = (
        bind_graph(gradient_graph(config, 2, 17), seeded_weights(CONFIG))(
            seeded_batch(CONFIG, 2, 17)
        )
        for config in (CONFIG, SAVED)
    )
    errors = {
        name: relative_error(bf16_gradients[name], f32_gradients[name]) for name in f32_gradients
    }
    assert all(1e-5 < error < 3e-2 for error in errors.values()), errors


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "qwen3", "phi3"])
def test_backward_reads_bf16_and_the_residual_stream(name):
    """And what attention returns; what was read back for the forward pass is read back again."""
    config = replace(CONFIGS[name], saved="bf16")
    graph = build_graph(STEP, StepShape(config, 1, 16), AdamW()).graph
    backward = (call for call in graph.calls if call.phase == "backward")
    read = {t.base for call in backward for t in call.reads}
    activations = [t for t in read if t.call is not None and t.call.phase == "forward"]
    f32_ops = {t.call.op.name for t in activations if t.call is not None and t.dtype != bf16}
    assert f32_ops.isdisjoint({"cast", "rms_norm", "rope", "swiglu", "geglu"})
    width = config.embedding_length
    assert all(t.shape[-1] == width for t in activations if t.call and t.call.op.name == "matmul")
    assert sum(t.dtype == bf16 for t in activations) >= 5 * config.block_count


def test_a_plan_needs_fewer_bytes():
    none = replace(REQUEST, recompute="none")
    arenas = [
        make_plans(find_fastest_shape(shape, none.with_limit(1 << 40)).shape, AdamW()).arena_nbytes
        for shape in (
            replace(LARGE, micro_batch_size=8),
            in_bf16(replace(LARGE, micro_batch_size=8)),
        )
    ]
    assert arenas[1] < 0.75 * arenas[0]


def test_a_search_recomputes_less_within_the_same_limit():
    """The type itself is chosen by the settings alone."""
    shape = replace(LARGE, micro_batch_size=8)
    limit = int(PlanSearch(REQUEST).rough_draft(in_bf16(shape)).nbytes * 1.05)
    f32_answer, bf16_answer = (
        find_fastest_shape(candidate, REQUEST.with_limit(limit))
        for candidate in (shape, in_bf16(shape))
    )
    assert (
        f32_answer.is_within_limits
        and f32_answer.shape.config.saved == "f32"
        and f32_answer.shape.keep is not None
    )
    assert bf16_answer.is_within_limits and bf16_answer.shape == in_bf16(shape)


def test_evaluation_rounds_nothing():
    casts = [
        sum(call.op.name == "cast" for call in build_graph(name, SHAPE, AdamW()).graph.calls)
        for name in (STEP, EVALUATE)
    ]
    assert casts[0] > 0 and casts[1] == 0


def test_lora_on_a_frozen_base_keeps_what_its_adapters_read():
    lora = Lora((("blk.*", 2),))
    config = replace(SAVED, lora=lora)
    built = build_graph(STEP, StepShape(config, 2, 17, base=BaseModel(())), AdamW())
    read = {t.base for c in built.graph.calls if c.phase == "backward" for t in c.reads}
    assert sum(t.dtype == bf16 for t in read) >= 5 * COUNT


# ---- the kernels of cast -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 15, 16, 17, 40_001])
def test_casts_have_the_bits_of_the_specification(size):
    x = input("x", (size,))
    stored = ops.cast(x, dtype=bf16)
    graph = Graph({"stored": stored, "back": ops.cast(stored)})
    values = np.random.default_rng(0).integers(0, 2**32, size, np.uint32).view(np.float32)
    values[: min(size, 6)] = [np.nan, np.inf, -np.inf, 3.4e38, 1e-45, -0.0][: min(size, 6)]
    cpu_output, spec = (
        run_graph(graph, {"x": values}, (backend,)) for backend in (backends.cpu, backends.numpy)
    )
    assert same_bits(cpu_output, spec)
    restored = cpu_output["back"]
    assert (np.isnan(restored) == np.isnan(values)).all()
    finite = np.isfinite(values) & (np.abs(values) < 3e38) & (np.abs(values) > 1e-37)
    assert (np.abs(restored[finite] - values[finite]) <= 2.0**-8 * np.abs(values[finite])).all()
    count = kernels.threads()
    kernels.set_threads(1)
    try:
        assert same_bits(run_graph(graph, {"x": values}, (backends.cpu,)), cpu_output)
    finally:
        kernels.set_threads(count)


def test_placing_needs_no_other_backend():
    x = input("x", (3, 8))
    placed = place(Graph({"y": ops.cast(ops.cast(x, dtype=bf16))}))
    assert {step.backend.name for step in placed.steps} == {"cpu"}
