"""Steps of training: accumulation, evaluation, schedules."""

import numpy as np
import pytest

from packtrain.engine.backends import aligned, cpu
from packtrain.engine.graph import Graph
from packtrain.engine.optim import AdamW
from packtrain.engine.placement import place
from packtrain.inference.kv_cache.kv_cells import CellTable
from packtrain.models import transformer
from packtrain.models.cached_transformer import CacheLayout, generation
from packtrain.planner.checkpointing import uniform_choice
from packtrain.planner.step_shape import StepShape
from packtrain.planner.training_plans import EVALUATE, MICRO, STEP, UPDATE, make_plans
from packtrain.training.lr_schedule import LrSchedule
from packtrain.training.training_engine import TrainingEngine
from tests.cell_inputs import feed_inputs
from tests.models import CONFIG, seeded_batch, seeded_weights

ROWS, TIME = 4, 16


def engine(rows: int, micros: int, **shape_options) -> TrainingEngine:
    model_engine = TrainingEngine(
        make_plans(StepShape(CONFIG, rows, TIME, micros, **shape_options), AdamW()), AdamW()
    )
    model_engine.session.set(seeded_weights(CONFIG))
    return model_engine


def windows(seed: int) -> dict[str, np.ndarray]:
    """A batch whose weights are 1 or 0, as data has them, unevenly over its rows."""
    inputs = seeded_batch(CONFIG, ROWS, TIME, seed)
    keep = np.arange(TIME)[None] < np.array([[TIME], [3], [9], [TIME - 1]])
    return inputs | {"weights": keep.astype(np.float32)}


def part(arrays: dict[str, np.ndarray], rows: slice) -> dict[str, np.ndarray]:
    return {name: value[rows] for name, value in arrays.items()}


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("keep", [None, uniform_choice(CONFIG.block_count, ())])
def test_micro_batches_are_one_batch(max_norm, keep):
    reference = engine(ROWS, 1, max_norm=max_norm, keep=keep)
    parts = engine(ROWS // 4, 4, max_norm=max_norm, keep=keep)
    assert set(reference.run) == {STEP, EVALUATE} and set(parts.run) == {MICRO, UPDATE, EVALUATE}
    for number in (1, 2, 3):
        full_batch = windows(number)
        a = reference.step([full_batch], number, 1e-2)
        b = parts.step([part(full_batch, slice(i, i + 1)) for i in range(4)], number, 1e-2)
        assert a.tokens == b.tokens == int(full_batch["weights"].sum())
        np.testing.assert_allclose([b.loss, b.norm], [a.loss, a.norm], rtol=1e-5)
    for name in transformer.weights(CONFIG):
        change = reference.session.get(name) - seeded_weights(CONFIG)[name]
        assert np.abs(change).max() > 1e-3
        np.testing.assert_allclose(
            parts.session.get(name), reference.session.get(name), atol=1e-4, err_msg=name
        )


def test_a_bad_step_is_skipped_named_and_its_sums_forgotten():
    parts, name = engine(2, 2, max_norm=1.0), "blk.0.ffn_up.weight"
    full_batch = windows(1)
    halves = [part(full_batch, slice(0, 2)), part(full_batch, slice(2, 4))]
    good = parts.session.get(name)
    huge = np.full_like(good, 3e38)
    parts.session.set({name: huge})
    did = parts.step(halves, 1, 1e-2)
    assert did.skip_reason is not None and "blk.0.ffn_up" in did.skip_reason
    assert (parts.session.get(name) == huge).all() and not parts.session.get(f"m/{name}").any()
    parts.session.set({name: good})
    assert parts.step(halves, 1, 1e-2).skip_reason is None
    assert np.isfinite(parts.session.get(name)).all() and parts.session.get(f"m/{name}").any()


def test_evaluation_is_the_mean_over_tokens_with_its_error_over_windows():
    model_engine = engine(ROWS, 1)
    batches = [windows(1), windows(2)]
    got = model_engine.evaluate(batches)
    losses = [
        model_engine.run[EVALUATE](b)["losses"].astype(np.float64) * b["weights"] for b in batches
    ]
    sums, counts = np.concatenate(losses).sum(1), np.tile([TIME, 3, 9, TIME - 1], 2)
    assert got.tokens == counts.sum()
    assert got.loss == pytest.approx(sums.sum() / counts.sum(), rel=1e-12)
    residual = sums - counts * got.loss
    error = np.sqrt((residual**2).sum() * 8 / 7) / counts.sum()
    assert got.error == pytest.approx(error, rel=1e-9)
    single = windows(1)
    single["weights"][1:] = 0
    assert np.isnan(model_engine.evaluate([single]).error)  # one window tells nothing of the spread


def test_a_plan_counts_every_leaf_once_and_one_arena():
    plans = make_plans(StepShape(CONFIG, 2, TIME, 3), AdamW())
    leaves = [leaf.spec for leaf in transformer.weights(CONFIG).values()]
    parameters = sum(spec.nbytes for spec in leaves)
    assert plans.weight_nbytes == parameters == plans.gradient_nbytes
    assert plans.state_nbytes == 2 * parameters
    assert plans.arena_nbytes == max(p.arena().nbytes for p in plans.plans.values())
    leaf_nbytes = 4 * sum(aligned(spec.nbytes, cpu.alignment) for spec in leaves)
    assert plans.nbytes == leaf_nbytes + plans.arena_nbytes + plans.loop_nbytes


def test_schedules():
    cosine = LrSchedule("cosine", 1.0, 0.1, warmup_steps=10, steps=110)
    assert [cosine.rate(s) for s in (1, 5, 10)] == [0.1, 0.5, 1.0]
    assert cosine.rate(11) == 1.0
    assert cosine.rate(110) == pytest.approx(0.1)
    assert LrSchedule("cosine", 1.0, 0.0, 0, 101).rate(51) == pytest.approx(0.5)
    assert LrSchedule("linear", 1.0, 0.2, 0, 101).rate(26) == pytest.approx(0.8)
    assert {LrSchedule("constant", 0.3, 0.0, 2, 9).rate(s) for s in range(2, 10)} == {0.3}
    cycles = LrSchedule("cosine", 1.0, 0.0, 0, 101, num_cycles=2)
    assert cycles.rate(50) < 0.01 and cycles.rate(51) == pytest.approx(1.0)
    assert cycles.rate(101) == pytest.approx(0.0, abs=1e-9)
    assert LrSchedule("cosine", 1.0, 0.0, 1, 1).rate(1) == 1.0
    growing = LrSchedule(
        "linear", 1.0, 0.0, 0, 71, num_cycles=3, cycle_growth=2.0
    )  # of 10, 20 and 40 steps
    assert [s for s in range(1, 71) if growing.rate(s) == 1.0] == [1, 11, 31]
    assert growing.rate(21) == pytest.approx(0.5) and growing.rate(71) == 0.0
    warm = LrSchedule("constant", 1.0, 0.0, 4, 9, start_lr=0.2)
    assert [warm.rate(s) for s in (1, 3, 4, 5)] == pytest.approx([0.4, 0.8, 1.0, 1.0])
    halving = LrSchedule("halving", 1.0, 0.2, 1, 99, halving_steps=3)
    assert [halving.rate(s) for s in (1, 2, 4, 5, 7, 8, 99)] == [1, 1, 1, 0.5, 0.5, 0.25, 0.2]


def test_accuracy_counts_the_targets_that_were_likeliest():
    model_engine, inputs = engine(ROWS, 1), windows(5)
    logits, handles = generation(CONFIG, transformer.weights(CONFIG), TIME, CacheLayout(TIME), TIME)
    run = model_engine.session.executor(place(Graph({"logits": logits}, handles)))
    likeliest = []
    for row in range(ROWS):
        fed = feed_inputs(
            CellTable(TIME), inputs["tokens"][row], inputs["seq"][row], np.arange(TIME)
        )
        likeliest.append(run(fed)["logits"].argmax(-1))
    inputs["targets"][:, ::2] = np.array(likeliest)[:, ::2]
    right = (np.array(likeliest) == inputs["targets"]) * inputs["weights"]
    got, share = model_engine.evaluate([inputs]), right.sum() / inputs["weights"].sum()
    assert got.accuracy == pytest.approx(share) and 0.3 < share < 1
    assert got.accuracy_error == pytest.approx((share * (1 - share) / (got.tokens - 1)) ** 0.5)
