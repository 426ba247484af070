"""L-BFGS: its path against the rule in NumPy, its minima, its line searches, and runs that stop and resume."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain.cli.main import main
from packtrain.common.errors import InputError
from packtrain.engine import ops
from packtrain.engine.optim import LBFGS, AdamW, accumulation_graph, update_graph
from packtrain.engine.optim.linesearch import (
    CONDITIONS,
    NONE,
    STRONG,
    LinePoint,
    LineSearch,
    lbfgs_direction,
)
from packtrain.engine.tensor import GraphError, Tensor, weight
from packtrain.gguf import GGUF
from packtrain.planner.step_shape import StepShape
from packtrain.planner.training_plans import MICRO, UPDATE, make_plans
from packtrain.training.finetune_settings import TuneSettings
from packtrain.training.training_engine import EngineStep, TrainingEngine
from packtrain.workflows.planned_run import check_effects
from tests.architectures import random_model
from tests.kill import sample_chats
from tests.models import CONFIG, same_bits, seeded_batch, seeded_weights
from tests.room import memory_limit

LINE_SEARCHES = [c for c in CONDITIONS if c != NONE]
Function = Callable[[np.ndarray], tuple[float, np.ndarray]]


class Descent:
    """A run of L-BFGS on a function of weights x and y, written as a graph."""

    def __init__(self, loss: Tensor, start: dict[str, np.ndarray], **settings) -> None:
        self.optimizer = LBFGS(**settings)
        self.session = pt.Session()
        weights = {t.label: t for t in pt.Graph([loss]).leaves if t.kind == "weight"}
        trained = [weights[name] for name in start]
        graphs = {
            MICRO: accumulation_graph({"loss": loss}, trained),
            UPDATE: update_graph(trained, self.optimizer),
        }
        self.run = {name: self.session.executor(pt.place(g)) for name, g in graphs.items()}
        self.session.set(start)
        self.before: EngineStep | None = None
        self.losses, self.notes, self.number, self.evaluations = [], [], 0, 0

    def step(self, lr: float = 1.0) -> np.ndarray:
        turn = EngineStep(self.run, [{}], {}, self.before)
        self.number += 1
        got = self.optimizer.drive(turn, self.number, lr)
        self.losses.append(float(got["loss"]))
        self.notes.append(turn.note)
        self.evaluations += turn.evaluations
        self.before = turn
        return self.x

    @property
    def x(self) -> np.ndarray:
        return np.concatenate(
            [
                self.session.get(n).ravel()
                for n in self.run[UPDATE].placed.graph.names.values()
                if n in ("x", "y")
            ]
        )


def quadratic() -> tuple[Tensor, dict[str, np.ndarray], Function]:
    """Half of the squares of two matrices' rows, each with its own weight from 1 to 100; the least is at 1."""
    sizes = {"x": (4, 5), "y": (7,)}
    scales = np.geomspace(1, 100, 27)
    start = np.random.default_rng(5).standard_normal(27).astype(np.float32)
    at, parts, begin = 0, [], {}
    for name, shape in sizes.items():
        n = int(np.prod(shape))
        off = ops.scale(weight(name, shape), by=1.0, bias=-1.0)
        scale = pt.constant(f"of {name}", scales[at : at + n].reshape(shape))
        parts.append(ops.sum(ops.mul(scale, ops.sqr(off))))
        begin[name] = start[at : at + n].reshape(shape)
        at += n

    def value(x: np.ndarray) -> tuple[float, np.ndarray]:
        return 0.5 * float(scales @ (x - 1) ** 2), scales * (x - 1)

    return ops.scale(ops.add(*parts), by=0.5), begin, value


def rosenbrock() -> tuple[Tensor, dict[str, np.ndarray], Function]:
    """(1 - x)^2 + 100 (y - x^2)^2, from the usual start."""
    x, y = weight("x", (1,)), weight("y", (1,))
    first = ops.sqr(ops.scale(x, by=-1.0, bias=1.0))
    second = ops.scale(ops.sqr(ops.sub(y, ops.sqr(x))), by=100.0)

    def value(at: np.ndarray) -> tuple[float, np.ndarray]:
        a, b = at
        slope = [-2 * (1 - a) - 400 * a * (b - a * a), 200 * (b - a * a)]
        return float((1 - a) ** 2 + 100 * (b - a * a) ** 2), np.array(slope)

    begin = {"x": np.array([-1.2], "f"), "y": np.array([1.0], "f")}
    return ops.sum(ops.add(first, second)), begin, value


FUNCTIONS = {"quadratic": quadratic, "rosenbrock": rosenbrock}


def reference_path(
    value: Function, x: np.ndarray, steps: int, history: int, search: LineSearch
) -> list[np.ndarray]:
    """The path in float64, by the two loops over vectors as the book has them."""
    pairs, path = [], []
    for _ in range(steps):
        loss, g = value(x)
        q, shares = g.copy(), []
        for s, y in reversed(pairs):
            shares.append(s @ q / (s @ y))
            q -= shares[-1] * y
        if pairs:
            s, y = pairs[-1]
            q *= s @ y / (y @ y)
        for (s, y), share in zip(pairs, reversed(shares), strict=True):
            q += (share - y @ q / (s @ y)) * s
        first = 1.0 if pairs else min(1.0, 1 / float(np.linalg.norm(g)))

        def at(length: float, x=x, q=q) -> LinePoint:
            loss, slope = value(x - length * q)
            return LinePoint(length, loss, float(-slope @ q))

        point, failure = search.find_point(LinePoint(0.0, loss, float(-g @ q)), first, at)
        assert failure is None
        next_x = x - point.length * q
        pairs = [*pairs, (next_x - x, value(next_x)[1] - g)][-history:]
        x = next_x
        path.append(x)
    return path


# ---- the path ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("condition", LINE_SEARCHES)
def test_the_path_is_the_rule(name: str, condition: str) -> None:
    """The first steps, more than the history holds, against vectors and two loops in float64."""
    loss, start, value = FUNCTIONS[name]()
    descent = Descent(loss, start, history=3, line_search=condition)
    x = np.concatenate([v.ravel() for v in start.values()]).astype(np.float64)
    assert np.array_equal(descent.x, x)
    for expected in reference_path(value, x, 8, 3, LineSearch(condition)):
        np.testing.assert_allclose(descent.step(), expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("condition", LINE_SEARCHES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_finds_the_minimum(name: str, condition: str) -> None:
    loss, start, value = FUNCTIONS[name]()
    descent = Descent(loss, start, line_search=condition)
    for _ in range(60):
        descent.step()
    np.testing.assert_allclose(descent.x, np.ones_like(descent.x), atol=2e-3)
    assert value(descent.x.astype(np.float64))[0] < 1e-7 * descent.losses[0]
    decreases = [
        a > b for a, b in zip(descent.losses, descent.losses[1:], strict=False) if b > 1e-6
    ]
    assert len(decreases) > 8 and all(decreases)


@pytest.mark.torch
@pytest.mark.parametrize("name", FUNCTIONS)
def test_pytorch_finds_the_same_with_as_many_evaluations(name: str) -> None:
    import torch

    loss, start, value = FUNCTIONS[name]()
    x = torch.tensor(np.concatenate([v.ravel() for v in start.values()]), dtype=torch.float64)
    x.requires_grad_()
    count = 0

    def closure() -> float:
        nonlocal count
        count += 1
        loss_value, slope = value(x.detach().numpy())
        x.grad = torch.tensor(slope)
        return loss_value

    torch.optim.LBFGS([x], max_iter=60, history_size=6, line_search_fn="strong_wolfe").step(closure)
    descent = Descent(loss, start)
    while value(descent.x.astype(np.float64))[0] > 1e-6 and descent.number < 60:
        descent.step()
    np.testing.assert_allclose(descent.x, x.detach().numpy(), atol=2e-3)
    assert descent.evaluations <= count


def test_products_alone_give_the_direction() -> None:
    """From inner products, against the same two loops over the vectors."""
    rng = np.random.default_rng(2)
    m, n, order = 4, 30, [2, 1, 0, 3]
    g, s = rng.standard_normal(n), rng.standard_normal((m, n))
    hessian = np.diag(rng.uniform(1, 9, n))
    y = s @ hessian
    y[1] *= -1  # a pair without curvature does not count
    every = np.concatenate([g[None], s, y])
    step_direction = lbfgs_direction(every @ np.concatenate([g[None], y]).T, order) @ every
    q, shares = g.copy(), {}
    for i in (2, 0, 3):
        shares[i] = s[i] @ q / (s[i] @ y[i])
        q -= shares[i] * y[i]
    q *= s[2] @ y[2] / (y[2] @ y[2])
    for i in (3, 0, 2):
        q += (shares[i] - y[i] @ q / (s[i] @ y[i])) * s[i]
    np.testing.assert_allclose(step_direction, -q, rtol=1e-9, atol=1e-12)


# ---- line searches -----------------------------------------------------------------------------------------------


def line_functions() -> dict[str, Callable[[float], tuple[float, float]]]:
    """Functions of a length and their derivatives, all falling at 0."""
    return {
        "parabola": lambda t: ((t - 3) ** 2, 2 * (t - 3)),
        "steep": lambda t: ((t - 1e-3) ** 2 * 1e4, 2e4 * (t - 1e-3)),
        "far": lambda t: ((t / 1e4 - 1) ** 2, 2 * (t / 1e4 - 1) / 1e4),
        "waves": lambda t: (0.1 * t * t - np.sin(5 * t), 0.2 * t - 5 * np.cos(5 * t)),
        "wall": lambda t: (t * t - t, 2 * t - 1) if t < 0.7 else (np.nan, np.nan),
    }


@pytest.mark.parametrize("condition", LINE_SEARCHES)
@pytest.mark.parametrize("name", line_functions())
@pytest.mark.parametrize("first", [1e-4, 1.0, 1e3])
def test_an_accepted_point_fulfils_the_condition(name: str, condition: str, first: float) -> None:
    line, tried = line_functions()[name], []
    armijo, wolfe = 1e-3, 0.4

    def at(length: float) -> LinePoint:
        tried.append(LinePoint(length, *line(length)))
        return tried[-1]

    start = LinePoint(0.0, *line(0.0))
    accepted, failure = LineSearch(condition, armijo, wolfe, max_trials=40).find_point(
        start, first, at
    )
    assert failure is None and accepted is tried[-1] and len(tried) <= 20
    assert accepted.loss <= start.loss + armijo * accepted.length * start.slope < start.loss
    if condition != "armijo":
        assert accepted.slope >= wolfe * start.slope
    if condition == STRONG:
        assert abs(accepted.slope) <= wolfe * abs(start.slope)


def test_a_search_that_fails_returns_the_best_point_and_says_why() -> None:
    start = LinePoint(0.0, 1.0, -1.0)
    best_point, failure = LineSearch(STRONG, max_trials=5).find_point(
        start, 1.0, lambda t: LinePoint(t, 1.0 + t, 1.0)
    )
    assert (
        best_point is start
        and failure
        and "none of 5 lengths" in failure
        and "flat enough" in failure
    )
    falling = LineSearch(STRONG, max_trials=5, max_length=50.0).find_point(
        start, 1.0, lambda t: LinePoint(t, 1 - t, -1.0)
    )
    assert falling[0].length == 10.0 and falling[1] and "is left" in falling[1]
    shrinking = LineSearch("armijo", max_trials=99, min_length=1e-3).find_point(
        start, 1.0, lambda t: LinePoint(t, 2.0, 1.0)
    )
    assert shrinking[0] is start and shrinking[1] and "is left" in shrinking[1]


def test_after_a_search_that_failed_the_weights_are_at_the_best_point() -> None:
    """One trial is too few for a Wolfe condition this strict; and where no trial is better, they are at the start."""
    loss, start, value = rosenbrock()
    descent = Descent(loss, start, trials=2, wolfe=0.1)
    x = descent.x
    for _ in range(8):
        next_x = descent.step()
        assert value(next_x.astype(np.float64))[0] <= value(x.astype(np.float64))[0] * (1 + 1e-6)
        x = next_x
    failed = [note for note in descent.notes if note]
    assert failed and all("the weights are at the best one" in note for note in failed)
    wall = ops.sum(ops.log(weight("x", (1,))))  # not finite beyond 0
    wall_descent = Descent(wall, {"x": np.array([1e-3], "f")}, trials=1)
    assert (
        wall_descent.step(1.0) == np.float32(1e-3) and "none of 1 lengths" in wall_descent.notes[0]
    )
    assert not wall_descent.session.get("s/x").any() and not wall_descent.session.get("y/x").any()


def test_at_the_minimum_nothing_moves() -> None:
    loss, _, _ = rosenbrock()
    descent = Descent(loss, {"x": np.array([1.0], "f"), "y": np.array([1.0], "f")})
    assert descent.step().tolist() == [1.0, 1.0] and descent.evaluations == 1


# ---- runs ---------------------------------------------------------------------------------------------------------


def lbfgs_engine_of(
    micros: int = 1, **settings
) -> tuple[TrainingEngine, list[dict[str, np.ndarray]]]:
    optimizer = LBFGS(**settings)
    lbfgs_engine = TrainingEngine(
        make_plans(StepShape(CONFIG, 4 // micros, 16, micros, num_evaluations=2), optimizer),
        optimizer,
    )
    lbfgs_engine.session.set(seeded_weights(CONFIG))
    full_batch = seeded_batch(CONFIG, 4, 16) | {"weights": np.ones((4, 16), np.float32)}
    parts = range(0, 4, 4 // micros)
    return lbfgs_engine, [
        {n: x[at : at + 4 // micros] for n, x in full_batch.items()} for at in parts
    ]


@pytest.mark.parametrize("micros", [1, 2])
def test_a_start_that_is_known_is_not_evaluated_again(micros: int) -> None:
    """With the same bits as when it is; a batch that differs is evaluated at its start."""
    (cached_engine, micro), (fresh_engine, _) = lbfgs_engine_of(micros), lbfgs_engine_of(micros)
    counts = []
    for t in range(1, 5):
        cached_engine.step(micro, t, 1.0)
        counts.append(cached_engine.before.evaluations)
        fresh_engine.before = None
        fresh_engine.step(micro, t, 1.0)
        assert fresh_engine.before.evaluations == counts[-1] + (t > 1)
    names = cached_engine.plans.leaves
    weights, expected = (
        {n: e.session.get(n) for n in names} for e in (cached_engine, fresh_engine)
    )
    assert same_bits(weights, expected) and min(counts) == 1
    other = [{**micro_batch, "tokens": micro_batch["tokens"][::-1].copy()} for micro_batch in micro]
    cached_engine.step(other, 5, 1.0)
    assert cached_engine.before.last is None


def test_its_state_is_counted_saved_and_enough_to_go_on() -> None:
    trained, micro = lbfgs_engine_of(history=4)
    adamw_plans = make_plans(StepShape(CONFIG, 4, 16), AdamW())
    assert trained.plans.state_nbytes == 4 * adamw_plans.state_nbytes
    assert trained.plans.gradient_nbytes == 2 * adamw_plans.weight_nbytes  # sums, and the direction
    for t in range(1, 8):
        trained.step(micro, t, 1.0)
    resumed, _ = lbfgs_engine_of(history=4)
    resumed.session.set({n: trained.session.get(n) for n in trained.plans.checkpoint_tensors})
    for lbfgs_engine in (trained, resumed):
        lbfgs_engine.step(micro, 8, 1.0)
    names = trained.plans.checkpoint_tensors
    assert same_bits(*({n: e.session.get(n) for n in names} for e in (trained, resumed)))


def test_a_bad_start_is_skipped_and_its_pairs_forgotten() -> None:
    lbfgs_engine, micro = lbfgs_engine_of()
    for t in (1, 2):
        lbfgs_engine.step(micro, t, 1.0)
    good = {n: lbfgs_engine.session.get(n) for n in lbfgs_engine.plans.trained_names}
    huge = good | {"output_norm.weight": np.full(CONFIG.embedding_length, 3e38, np.float32)}
    lbfgs_engine.session.set(huge)
    lbfgs_engine.before = None
    assert lbfgs_engine.step(micro, 3, 1.0).skip_reason is not None
    assert same_bits({n: lbfgs_engine.session.get(n) for n in huge}, huge)
    assert not any(lbfgs_engine.session.get(f"s/{n}").any() for n in huge)
    lbfgs_engine.session.set(good)
    lbfgs_engine.before = None
    assert (
        lbfgs_engine.step(micro, 4, 1.0).skip_reason is None
        and lbfgs_engine.step(micro, 5, 1.0).skip_reason is None
    )


def test_it_is_no_part_of_a_graph_of_one_pass() -> None:
    with pytest.raises(GraphError, match="a graph of its own"):
        make_plans(StepShape(CONFIG, 4, 16), LBFGS())


def test_train_resumes_bit_for_bit(tmp_path: Path, capsys, monkeypatch) -> None:
    """Within a budget, with micro-batches; batches change from step to step."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the cat sat on the mat and saw a rat. " * 400)
    small = "train --data text.txt --dim 32 --layers 2 --heads 2 --ffn 64 --ctx 32 --batch-size 4"
    small += " --vocab-size 290 --grad-accumulation-steps 2 --history 3"
    small += f" --memory {memory_limit(300)}"
    small += " --optimizer lbfgs --no-tensorboard --steps-per-eval 0"
    for name, steps in (("whole", "6"), ("parts", "4"), ("parts", "6 --resume")):
        assert main([*small.split(), "-o", f"{name}.gguf", "--iters", *steps.split()]) == 0, (
            capsys.readouterr()
        )
    saved = [GGUF(Path(f"{name}.run/checkpoint.gguf")) for name in ("whole", "parts")]
    assert [*saved[0].entries] == [*saved[1].entries]
    for name in saved[0].entries:
        assert saved[0].array(name).tobytes() == saved[1].array(name).tobytes(), name
    records = [
        json.loads(line) for line in Path("whole.run/metrics.jsonl").read_text().splitlines()
    ]
    losses = [r["loss"] for r in records if "loss" in r]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_finetune_resumes_bit_for_bit(kind: str, tmp_path: Path, capsys, monkeypatch) -> None:
    """All of the data in each step, so that a start is known; in one life and in two."""
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text(sample_chats(12))
    random_model(Path("base.gguf"), "llama tied")
    flags = (
        "finetune base.gguf --data chats.jsonl --batch-size 2 --grad-accumulation-steps 9 --ctx 64"
    )
    flags += " --optimizer lbfgs --val-split 0 --no-tensorboard"
    flags += f" --memory {memory_limit(400)}"
    flags += " --full" if kind == "full" else " --lora-rank 4"
    for name, steps in (("whole", "5"), ("parts", "2"), ("parts", "5 --resume")):
        assert main([*flags.split(), "-o", f"{name}.gguf", "--iters", *steps.split()]) == 0, (
            capsys.readouterr()
        )
    saved = [GGUF(Path(f"{name}.run/checkpoint.gguf")) for name in ("whole", "parts")]
    for name in saved[0].entries:
        assert saved[0].array(name).tobytes() == saved[1].array(name).tobytes(), name
    records = Path("whole.run/metrics.jsonl").read_text().splitlines()
    losses = [record["loss"] for record in map(json.loads, records) if "loss" in record]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True)


def test_masters_of_bf16_are_refused() -> None:
    with pytest.raises(InputError, match="bf16 is too coarse for the line search"):
        check_effects(TuneSettings(full=True, masters="bf16", optimizer="lbfgs"))
    check_effects(TuneSettings(full=True, optimizer="lbfgs"))
