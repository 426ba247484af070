"""An optimizer is one file: added to a copy of the package, driven in several evaluations, known by its roles."""

import dataclasses
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from packtrain.common.options import TRAINING
from packtrain.dtypes import bf16, i64
from packtrain.engine import ops
from packtrain.engine.backends import Target, cpu
from packtrain.engine.executor import Session
from packtrain.engine.graph import Graph
from packtrain.engine.interpreter import interpret
from packtrain.engine.optim import (
    OPTIMIZERS,
    SGD,
    AdamW,
    AdamW8bit,
    Muon,
    Muon8bit,
    Optimizer,
    StepInputs,
    StepRunner,
    leaner_optimizers,
    moment,
)
from packtrain.engine.optim.muon import orthogonalize
from packtrain.engine.optim.optimizer import Values
from packtrain.engine.optim.sgd import opt_step_sgd
from packtrain.engine.placement import place
from packtrain.engine.tensor import Tensor, input, state, weight
from packtrain.gguf import GGUF
from packtrain.planner.step_shape import BaseModel, StepShape
from packtrain.planner.step_variants import candidates
from packtrain.planner.training_plans import MICRO, UPDATE, make_plans, runs
from packtrain.training.run_settings import with_optimizer_options
from packtrain.training.training_engine import TrainingEngine
from tests.copied import copy_package, edit_file, packtrain_in
from tests.models import CONFIG, same_bits, seeded_batch, seeded_weights

TIME = 16
TOY = '''"""Steps of one size along the sign of a running mean of gradients."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from packtrain.engine.optim.optimizer import StepInputs, Optimizer, moment
from packtrain.common.options import TRAINING
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, state, weight


@dataclass(frozen=True, slots=True)
class Toy(Optimizer):
    name: ClassVar[str] = "toy"
    note: ClassVar[str] = "takes steps of one size"
    hyper: ClassVar[tuple[str, ...]] = ("lr", "blend")

    lr: float = 1e-3
    blend: float = TRAINING(0.5, "toy: share of the last mean in the next", min_value=0, max_value=1)

    def numbers(self, t: int, lr: float) -> tuple[float, ...]:
        return lr, self.blend

    def states(self, w: Tensor) -> tuple[Tensor, ...]:
        return (moment("mu", w),)

    def update(self, w: Tensor, g: Tensor, *states: Tensor, step_inputs: StepInputs) -> tuple[Tensor, ...]:
        (mu,) = states
        return toy_step(w, g, mu, step_inputs.hyper, step_inputs.gate)


@op(writes=(0, 2))
def toy_step(w: Tensor, g: Tensor, mu: Tensor, hyper: Tensor, gate: Tensor) -> tuple[Spec, ...]:
    """mu = blend mu + (1 - blend) gate g;  w = w - lr sign(mu)."""
    return w.spec, mu.spec


@toy_step.kernel("numpy")
def toy_step_numpy(out, w, g, mu, hyper, gate):
    if np.isfinite(gate):
        lr, blend = hyper
        mu[...] = blend * mu + (1 - blend) * gate * g
        w[...] = w - lr * np.sign(mu)


toy_step.kernel("cpu")(toy_step_numpy)


@toy_step.samples
def toy_step_samples():
    hyper, gate = constant("hyper", np.array([0.1, 0.5])), constant("gate", np.array(0.5))
    yield from toy_step(weight("w", (17,)), input("g", (17,)), state("mu", (17,)), hyper, gate)
'''


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, to which one file and its name were added, and with some text."""
    folder = tmp_path_factory.mktemp("toy")
    home = copy_package(folder) / "engine/optim"
    (home / "toy.py").write_text(TOY)
    edit_file(
        home / "__init__.py",
        ("AdamW8bit, Muon8bit)", "AdamW8bit, Muon8bit, Toy)"),
        ("\n\n__all__", "\nfrom packtrain.engine.optim.toy import Toy\n\n__all__"),
    )
    (folder / "text.txt").write_text("the cat sat on the mat and saw a rat. " * 400)
    return folder


SMALL = """train --data text.txt --optimizer toy --blend 0.25 --memory 400MiB --dim 32 --layers 2 --heads 2 --ffn 64
 --ctx 32 --vocab-size 290 --batch-size 4 --lr-scheduler constant --warmup-ratio 0 --no-tensorboard"""


def test_one_file_and_its_name_add_an_optimizer(copy: Path) -> None:
    """It trains within a budget, and a resumed run gives the same bits as one that went through."""
    for name, steps in (("whole", "5"), ("parts", "2"), ("parts", "5 --resume")):
        ran = packtrain_in(copy, f"{SMALL} -o {name}.gguf --iters {steps}")
        assert ran.returncode == 0, ran.stderr
    reference, parts = ((copy / f"{name}.gguf").read_bytes() for name in ("whole", "parts"))
    assert len(reference) == len(parts)
    saved = [GGUF(copy / f"{name}.run/checkpoint.gguf") for name in ("whole", "parts")]
    assert [*saved[0].entries] == [*saved[1].entries]
    for name in saved[0].entries:
        assert saved[0].array(name).tobytes() == saved[1].array(name).tobytes(), name
    moments = {name for name in saved[0].entries if name.startswith("mu/")}
    assert len(moments) * 2 == len(saved[0].entries)
    assert any(saved[0].array(name).any() for name in moments)
    plan = json.loads((copy / "whole.run/plan.json").read_text())
    assert plan["fits"] and plan["state_bytes"] == plan["weights_bytes"] > 0


def test_moments_in_8_bits_take_a_quarter_and_resume_with_equal_bits(copy: Path) -> None:
    plan, _ = check_resume(copy, "adamw8bit")
    assert plan["state_bytes"] < 0.26 * 2 * plan["weights_bytes"]


def check_resume(copy: Path, optimizer: str) -> tuple[dict[str, Any], list[str]]:
    """A resumed run ends with the bits of one left alone; returns its plan and the names of its checkpoint."""
    flags = SMALL.replace("toy --blend 0.25", optimizer).replace("--dim 32", "--dim 128")
    unbroken, resumed = f"unbroken-{optimizer}", f"resumed-{optimizer}"
    for name, steps in ((unbroken, "5"), (resumed, "2"), (resumed, "5 --resume")):
        ran = packtrain_in(copy, f"{flags} -o {name}.gguf --iters {steps}")
        assert ran.returncode == 0, ran.stderr
    saved = [GGUF(copy / f"{name}.run/checkpoint.gguf") for name in (unbroken, resumed)]
    assert [*saved[0].entries] == [*saved[1].entries]
    for name in saved[0].entries:
        assert saved[0].array(name).tobytes() == saved[1].array(name).tobytes(), name
    return json.loads((copy / f"{unbroken}.run/plan.json").read_text()), [*saved[0].entries]


def test_steps_with_moments_in_8_bits_are_nearly_those_in_32() -> None:
    """Blocks with gradients of many sizes, and a last block that is not full."""
    shape = 65, 67
    sizes = 10.0 ** np.random.default_rng(3).uniform(-5, 0, shape)
    gradients = [sizes * np.random.default_rng(t % 5).standard_normal(shape) for t in range(20)]
    exact, rounded = (weights_after(kind(), gradients) for kind in (AdamW, AdamW8bit))
    assert 0 < np.abs(rounded - exact).mean() < 0.2 * np.abs(exact).mean()
    assert np.abs(rounded).max() < 2 * np.abs(exact).max()


def test_a_step_of_muon_with_momentum_in_8_bits_is_nearly_that_of_muon() -> None:
    """The first momentum is the gradient, whatever its bits; later ones are rounded."""
    rng = np.random.default_rng(4)
    gradients = [rng.standard_normal((65, 67)) for _ in range(8)]
    for count, limit in ((1, 1e-6), (8, 0.06)):
        exact, coded = (weights_after(kind(), gradients[:count]) for kind in (Muon, Muon8bit))
        off = np.abs(coded - exact).mean() / np.abs(exact).mean()
        assert off < limit and (count == 1 or off > 1e-4)


def test_momentum_in_8_bits_takes_an_eighth_and_resumes_with_equal_bits(copy: Path) -> None:
    plan, names = check_resume(copy, "muon8bit")
    assert any("b8/" in name for name in names)
    assert plan["state_bytes"] < 0.2 * 2 * plan["weights_bytes"]  # embeddings have two moments


def test_no_step_is_divided_by_a_moment_that_8_bits_lose() -> None:
    """One gradient swings, so that of its moments the second is large; the others are small, and end."""
    gradients = [np.full((64, 64), 1e-4) for _ in range(20)]
    for t, g in enumerate(gradients):
        g[:, ::64] = 1000 * (-1) ** t
    gradients.append(np.zeros((64, 64)))
    exact, rounded = (weights_after(kind(), gradients) for kind in (AdamW, AdamW8bit))
    assert np.abs(rounded).max() < 2 * np.abs(exact).max()


def weights_after(optimizer: Optimizer, gradients: list[np.ndarray]) -> np.ndarray:
    w = weight("w", gradients[0].shape)
    step_inputs = StepInputs(optimizer.leaf(), input("gate", ()), input("rounding", (2,), i64))
    leaves = w, input("g", w.shape), *optimizer.states(w)
    graph = Graph({}, [*optimizer.update(*leaves, step_inputs=step_inputs)])
    session = Session()
    executor = session.executor(place(graph, Target((cpu,))))
    session.set({"w": np.zeros(w.shape, np.float32)})
    for t, g in enumerate(gradients, 1):
        executor({"g": g.astype("f"), "gate": np.float32(1), **optimizer.inputs(t, 1e-3)})
    return session.get("w")


def test_flags_of_another_optimizer_are_refused(copy: Path) -> None:
    ran = packtrain_in(copy, f"{SMALL} --beta1 0.5")
    assert ran.returncode == 2
    assert "--beta1 has no effect with --optimizer toy" in ran.stderr
    assert "Traceback" not in ran.stderr
    ran = packtrain_in(copy, "train --help-all")
    assert "--blend" in ran.stdout and "toy takes steps of one size" in " ".join(ran.stdout.split())


# ---- roles ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Momentum(SGD):
    """Descent along the sum of all gradients."""

    name: ClassVar[str] = "momentum"

    def states(self, w: Tensor) -> tuple[Tensor, ...]:
        return (moment("blk.0.mu", w),)  # as a weight could be called

    def update(
        self, w: Tensor, g: Tensor, *states: Tensor, step_inputs: StepInputs
    ) -> tuple[Tensor, ...]:
        fresh = ops.scale(step_inputs.gate, by=0.0)
        (total,) = (ops.accumulate(*states, g, fresh),)
        hyper = ops.narrow(step_inputs.hyper, axis=0, start=0, length=2)
        return total, *opt_step_sgd(w, total, hyper, step_inputs.gate, decay=True)


def test_a_moment_counts_whatever_it_is_called() -> None:
    """Of a base of which one block is trained, what is not trained is mapped; moments are not."""
    shape = StepShape(CONFIG, 2, TIME, base=BaseModel((), num_trained_blocks=1))
    sgd_plans, momentum_plans = (make_plans(shape, optimizer) for optimizer in (SGD(), Momentum()))
    assert (
        set(momentum_plans.trained_names) == set(sgd_plans.trained_names)
        and momentum_plans.mapped_nbytes == sgd_plans.mapped_nbytes > 0
    )
    assert momentum_plans.state_nbytes == sgd_plans.weight_nbytes == momentum_plans.weight_nbytes
    assert momentum_plans.nbytes >= sgd_plans.nbytes + sgd_plans.weight_nbytes
    assert set(momentum_plans.checkpoint_tensors) == {
        f"{kind}{name}" for kind in ("", "blk.0.mu/") for name in sgd_plans.trained_names
    }


def test_sums_and_caches_begin_anew() -> None:
    plans = make_plans(StepShape(CONFIG, 1, TIME, 2), AdamW())
    assert {leaf.role for leaf in plans.resident_leaves.values()} == {"weight", "moment", "sum"}
    assert {leaf.role for leaf in plans.checkpoint_tensors.values()} == {"weight", "moment"}
    assert state("x", (2,)).role == "moment" and weight("w", (2,), bf16).role == "weight"


def test_others_that_keep_less_are_proposed() -> None:
    assert [optimizer.name for optimizer in leaner_optimizers(AdamW())] == [
        "sgd",
        "muon8bit",
        "adamw8bit",
        "muon",
    ]
    assert [*leaner_optimizers(SGD())] == []
    assert all(name == kind.name for name, kind in OPTIMIZERS.items())


@pytest.mark.parametrize("name", ["beta1", "batch_size"])
def test_two_settings_of_one_name_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer_class = dataclasses.make_dataclass(
        "Other",
        [(name, float, TRAINING(0.3, "another"))],
        bases=(SGD,),
        namespace={"name": "other"},
        frozen=True,
    )
    monkeypatch.setitem(OPTIMIZERS, "other", optimizer_class)
    settings_class = type(
        "Bare", (), {"__annotations__": {"optimizer": str}, "batch_size": TRAINING(8, "")}
    )
    with pytest.raises(TypeError, match=f"other: another setting is called {name}"):
        with_optimizer_options(settings_class)


# ---- several evaluations ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TwoStepSGD(SGD):
    """Two steps on a batch, the second one only where the first made the loss less."""

    evaluations: ClassVar[int] = 2

    def drive(self, turn: StepRunner, t: int, lr: float) -> Values:
        first = turn.evaluate()
        squares = turn.update(self.inputs(t, lr))
        if turn.evaluate()["loss"] < first["loss"]:
            turn.update(self.inputs(t, lr))
        return {**first, **squares}


def trained(
    optimizer: Optimizer, shape: StepShape, rates: list[float]
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of a step at each rate on one batch, and the weights after them."""
    engine = TrainingEngine(make_plans(shape, optimizer), optimizer)
    engine.session.set(seeded_weights(CONFIG))
    full_batch = seeded_batch(CONFIG, 4, TIME) | {"weights": np.ones((4, TIME), np.float32)}
    parts = range(0, 4, shape.micro_batch_size)
    micros = [
        {name: x[at : at + shape.micro_batch_size] for name, x in full_batch.items()}
        for at in parts
    ]
    losses = [engine.step(micros, t, rate).loss for t, rate in enumerate(rates, 1)]
    return losses, {name: engine.session.get(name) for name in engine.plans.trained_names}


@pytest.mark.parametrize("micros", [1, 2])
def test_an_optimizer_may_evaluate_several_times_in_a_step(micros: int) -> None:
    shape = StepShape(CONFIG, 4 // micros, TIME, micros, max_norm=1.0)
    double_shape = replace(shape, num_evaluations=2)
    assert runs(double_shape) == {MICRO: 2 * micros, UPDATE: 2}
    losses, expected = trained(SGD(), shape, [1e-2, 1e-2])
    assert losses[1] < losses[0]
    got = trained(TwoStepSGD(), double_shape, [1e-2])
    assert got[0] == losses[:1] and same_bits(got[1], expected)
    # a step that is too long is not followed by another
    assert same_bits(
        trained(TwoStepSGD(), double_shape, [30.0])[1], trained(SGD(), shape, [30.0])[1]
    )


def test_forms_of_several_evaluations_sum_their_gradients() -> None:
    forms = [*candidates(StepShape(CONFIG, 4, TIME, 2, max_norm=1.0, num_evaluations=2))]
    assert len(forms) == 3 and not any(form.layered or form.two_passes for form in forms)


# ---- momentum, and steps that are orthogonal ------------------------------------------------------------------


def test_a_step_of_muon_is_nearly_orthogonal() -> None:
    """Wide and tall alike: singular values near 1, and in the directions of the gradient's."""
    for shape in ((8, 24), (24, 8), (16, 16)):
        x = np.random.default_rng(1).standard_normal(shape)
        y = interpret(Graph({"y": orthogonalize(input("x", shape))}), {"x": x})["y"]
        u, _, v = np.linalg.svd(x, full_matrices=False)
        inner = u.T @ y @ v.T
        assert np.diag(inner).min() > 0.5 and np.diag(inner).max() < 1.3
        np.testing.assert_allclose(inner, np.diag(np.diag(inner)), atol=1e-9)


def test_momentum_is_the_sum_that_it_says() -> None:
    """Against the rule in NumPy, with and without Nesterov; a plan of one step serves all."""
    rates = [0.05, 0.02, 0.03]
    shape = StepShape(CONFIG, 4, TIME)
    for nesterov in (False, True):
        optimizer = SGD(momentum=0.9, nesterov=nesterov)
        _, updated = trained(optimizer, shape, rates)
        expected, sums = seeded_weights(CONFIG), dict[str, np.ndarray]()
        for rate in rates:
            for name, g in gradients_at(expected).items():
                sums[name] = 0.9 * sums.get(name, 0) + g
                expected[name] = expected[name] - rate * (
                    g + 0.9 * sums[name] if nesterov else sums[name]
                )
        for name, w in expected.items():
            np.testing.assert_allclose(updated[name], w, atol=1e-5)


def gradients_at(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of the batch that `trained` takes."""
    engine = TrainingEngine(make_plans(StepShape(CONFIG, 4, TIME), SGD()), SGD())
    engine.session.set(weights)
    full_batch = seeded_batch(CONFIG, 4, TIME) | {"weights": np.ones((4, TIME), np.float32)}
    engine.step([full_batch], 1, 1.0)
    return {name: w - engine.session.get(name) for name, w in weights.items()}


@pytest.mark.parametrize("optimizer", [SGD(momentum=0.9), Muon()], ids=["sgd", "muon"])
def test_the_loss_falls(optimizer: Optimizer) -> None:
    losses, _ = trained(optimizer, StepShape(CONFIG, 4, TIME), [0.03] * 8)
    assert losses[-1] < 0.9 * losses[0]


# ---- clipping ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_values_are_clipped_after_the_norm(max_norm: float | None) -> None:
    """As the rule says in NumPy, and alike in one pass, in two and from sums of micro-batches."""
    max_value = 2e-3
    shape = StepShape(CONFIG, 4, TIME, max_norm=max_norm, max_value=max_value)
    start, raw = seeded_weights(CONFIG), gradients_at(seeded_weights(CONFIG))
    norm = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in raw.values()))
    gate = 1.0 if max_norm is None else min(1.0, max_norm / norm)
    _, updated = trained(SGD(), shape, [1.0])
    clipped = 0
    for name, g in raw.items():
        expected = np.clip(gate * g, -max_value, max_value)
        clipped += int((np.abs(expected) == max_value).sum())
        np.testing.assert_allclose(start[name] - updated[name], expected, atol=2e-7, err_msg=name)
    assert norm > 0.5 and clipped > 100
    rates = [1e-2, 1e-2]
    _, reference = trained(AdamW(), shape, rates)
    clipped_by_norm = replace(shape, max_norm=max_norm or float("inf"))
    for variant in (
        {"two_passes": True},
        {"num_two_pass_blocks": 1},
        {"num_two_pass_blocks": CONFIG.block_count},
    ):
        assert same_bits(trained(AdamW(), replace(clipped_by_norm, **variant), rates)[1], reference)
    _, summed = trained(AdamW(), replace(shape, num_evaluations=2), rates)
    for name, w in reference.items():
        np.testing.assert_allclose(summed[name], w, atol=1e-6 if max_norm else 0, err_msg=name)


def test_a_gradient_that_is_not_finite_is_not_clipped_to_one_that_is() -> None:
    shape = StepShape(CONFIG, 4, TIME, max_value=1e-3)
    for form in (replace(shape, max_norm=1.0), replace(shape, num_evaluations=2)):
        engine = TrainingEngine(make_plans(form, AdamW()), AdamW())
        weights = seeded_weights(CONFIG) | {
            "output_norm.weight": np.full(CONFIG.embedding_length, 3e38, "f")
        }
        engine.session.set(weights)
        full_batch = seeded_batch(CONFIG, 4, TIME) | {"weights": np.ones((4, TIME), np.float32)}
        assert engine.step([full_batch], 1, 1e-2).skip_reason is not None
        assert same_bits({name: engine.session.get(name) for name in weights}, weights)


# ---- numbers are inputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (AdamW(), AdamW(beta1=0.5, beta2=0.7, eps=1e-3, weight_decay=0.4)),
        (SGD(momentum=0.9), SGD(momentum=0.3, weight_decay=0.2)),
        (Muon(), Muon(muon_momentum=0.5, weight_decay=0.3)),
    ],
    ids=["adamw", "sgd", "muon"],
)
def test_numbers_change_between_steps_without_a_new_plan(first: Optimizer, then: Optimizer) -> None:
    """The same bits as an engine that was planned for them, from the same state."""
    shape = StepShape(CONFIG, 4, TIME)
    full_batch = seeded_batch(CONFIG, 4, TIME) | {"weights": np.ones((4, TIME), np.float32)}
    engine, fresh, unchanged = (
        TrainingEngine(make_plans(shape, kind), kind) for kind in (first, then, first)
    )
    for runner in (engine, unchanged):
        runner.session.set(seeded_weights(CONFIG))
        runner.step([full_batch], 1, 1e-2)
    fresh.session.set({name: engine.session.get(name) for name in engine.plans.checkpoint_tensors})
    engine.optimizer = then
    for runner in (engine, fresh, unchanged):
        runner.step([full_batch], 2, 3e-2)
    result, expected, unlike = (
        {name: runner.session.get(name) for name in runner.plans.checkpoint_tensors}
        for runner in (engine, fresh, unchanged)
    )
    assert same_bits(result, expected) and not same_bits(result, unlike)


@pytest.mark.parametrize("kind", [AdamW, SGD, Muon])
def test_decay_is_of_tensors_with_so_many_axes(kind: type[AdamW | SGD]) -> None:
    shape, start, rate, share = StepShape(CONFIG, 4, TIME), seeded_weights(CONFIG), 1e-2, 0.5

    def after(**settings: float) -> dict[str, np.ndarray]:
        return trained(kind(**settings), shape, [rate])[1]

    still = after(weight_decay=0.0)
    for axes in (1, 2, 3):
        decayed = after(weight_decay=share, decay_axes=axes)
        for name, w in start.items():
            decay = rate * share * w if w.ndim >= axes else 0.0 * w
            np.testing.assert_allclose(decayed[name] + decay, still[name], atol=1e-6, err_msg=name)


def test_the_eps_of_adamw_is_added_to_the_root() -> None:
    """At step 1 both moments are those of the gradient itself: w = w - lr g / (|g| + eps)."""
    start, raw = seeded_weights(CONFIG), gradients_at(seeded_weights(CONFIG))
    _, updated = trained(AdamW(eps=0.1, weight_decay=0.0), StepShape(CONFIG, 4, TIME), [1e-2])
    for name, g in raw.items():
        expected = start[name] - 1e-2 * g / (np.abs(g) + 0.1)
        np.testing.assert_allclose(updated[name], expected, atol=1e-6, err_msg=name)
