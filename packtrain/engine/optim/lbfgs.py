"""L-BFGS: steps along a direction from the last pairs of step and gradient change; a line search finds the length.

The vectors stay on the device, in one graph whose input numbers say what to do; the host sees inner products only.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from packtrain import kernels
from packtrain.common.options import OPTIMIZER
from packtrain.dtypes import f32
from packtrain.engine import tensor
from packtrain.engine.ops.arrays import flatten, on_host
from packtrain.engine.ops.costs import Cost
from packtrain.engine.ops.torch_kernels import CHUNK, chunk_bounds, to_sum_dtype, torch
from packtrain.engine.optim import linesearch
from packtrain.engine.optim.linesearch import CONDITIONS, NONE, STRONG, LinePoint
from packtrain.engine.optim.optimizer import Optimizer, StepInputs, StepRunner, Tensors, Values
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require, state, weight

MEASURE, SLOPE, AIM, MOVE, KEEP, FORGET = range(6)
HEAD = 3  # numbers before the coefficients: phase, index of the step's pair, length


@dataclass(frozen=True, slots=True)
class LBFGS(Optimizer):
    """L-BFGS with a line search. Liu & Nocedal 1989; Nocedal & Wright 2006, chapter 7. A step evaluates at its start
    and at each length that it tries; where the next step has the same batch, its start is evaluated already. Until a
    step is done, its pair's rows of s and y hold the start and its gradient."""

    name: ClassVar[str] = "lbfgs"
    note: ClassVar[str] = "takes long steps on large batches, each with several evaluations"
    kernels: ClassVar[tuple[str, ...]] = ("elementwise", "update")
    evaluations: ClassVar[int] = 2
    first_length: ClassVar[float | None] = 1.0

    lr: float = 1.0
    history: int = OPTIMIZER(6, "L-BFGS: pairs to remember, two vectors each", min_value=1, max_value=100)  # fmt: skip
    line_search: str = OPTIMIZER(STRONG, "L-BFGS: condition on a step's length", choices=CONDITIONS)
    armijo: float = OPTIMIZER(1e-4, "L-BFGS: least decrease over the slope's", min_value=0, max_value=0.1,
                             conflicts="line_search=none")  # fmt: skip
    wolfe: float = OPTIMIZER(0.9, "L-BFGS: most slope left, as a share", min_value=0.1, max_value=0.999,
                            conflicts="line_search=none|armijo")  # fmt: skip
    trials: int = OPTIMIZER(20, "L-BFGS: lengths that a line search tries", min_value=1, max_value=1000,
                          conflicts="line_search=none")  # fmt: skip

    def leaf(self) -> Tensor:
        return input(self.name, (HEAD + 2 * self.history + 1,))

    def states(self, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pair_shape = (self.history, w.spec.size)
        s, y = (state(f"{vector_name}/{w.name}", pair_shape) for vector_name in "sy")
        return s, y, state(f"p/{w.name}", pair_shape[1:], role="sum")

    def update(self, w: Tensor, g: Tensor, *states: Tensor, step_inputs: StepInputs) -> Tensors:
        fact = "L-BFGS evaluates several times in a step"
        raise tensor.GraphError(f"{fact}: its update is a graph of its own")

    def measured(
        self, pairs: Iterable[tuple[Tensor, Tensor]], step_inputs: StepInputs
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        weight_vectors, dots = [(w, g, *self.states(w)) for w, g in pairs], None
        for _, g, s, y, p in weight_vectors:
            dots = lbfgs_dots(g, s, y, p, step_inputs.hyper, dots)
        assert dots is not None
        step_handles = (opt_step_lbfgs(*vectors, step_inputs.hyper) for vectors in weight_vectors)
        return {"dots": dots}, [handle for step in step_handles for handle in step]

    def without_decay(self) -> Optimizer:
        return replace(self, line_search=NONE)

    def drive(self, step: StepRunner, t: int, lr: float) -> Values:
        first, pair_index = step.last or step.evaluate(), (t - 1) % self.history

        def do(phase: int, length: float = 0.0, coefficients: np.ndarray | None = None) -> Values:
            numbers = np.zeros(HEAD + 2 * self.history + 1, np.float32)
            numbers[:HEAD] = phase, pair_index, length
            numbers[HEAD:] = 0.0 if coefficients is None else coefficients
            return step.update({self.name: numbers})

        def evaluate_at(length: float) -> LinePoint:
            do(MOVE, length)
            loss, outputs = float(step.evaluate()["loss"]), do(SLOPE)
            is_finite = np.isfinite(outputs["squares"])
            return LinePoint(length, loss, float(outputs["dots"][0, 0]) if is_finite else np.nan)

        outputs = do(MEASURE)
        dots, values = outputs["dots"].astype(np.float64), {**first, "squares": outputs["squares"]}
        if not (np.isfinite(first["loss"]) and np.isfinite(dots).all() and dots[0, 0]):
            do(FORGET)
            return values
        newest_pairs = [(pair_index - i) % self.history for i in range(1, self.history + 1)]
        coefficients = linesearch.lbfgs_direction(dots, newest_pairs)
        slope = float(coefficients @ dots[:, 0])
        if not slope < 0:
            coefficients, slope = -np.eye(len(coefficients))[0], -dots[0, 0]
        is_steepest = not coefficients[1:].any()
        length = lr * min(1.0, dots[0, 0] ** -0.5) if is_steepest else lr
        do(AIM, coefficients=coefficients)
        line_search = linesearch.LineSearch(self.line_search, self.armijo, self.wolfe, self.trials)
        start_point = LinePoint(0.0, float(first["loss"]), slope)
        point, reason = line_search.find_point(start_point, float(np.float32(length)), evaluate_at)
        if reason is not None:
            step.report(f"the line search found no step: {reason}; the weights are at the best one")
            evaluate_at(point.length)  # so that the next step may begin with this evaluation
        do(KEEP if point.length else FORGET)
        return values


@op(writes=(0, 2, 3, 4))
def opt_step_lbfgs(
    w: Tensor, g: Tensor, s: Tensor, y: Tensor, p: Tensor, numbers: Tensor
) -> tuple[Spec, ...]:
    """Run the phase numbers[0] of a step; return the new handles of w, s, y and p.

    AIM     p = c0 g + sum c s + sum c y;  s[i] = w;  y[i] = g;   i = numbers[1] mod M, c = numbers[3:]
    MOVE    w = s[i] + numbers[2] p
    KEEP    s[i] = w - s[i];  y[i] = g - y[i]
    FORGET  s = y = 0

        w, g     (...)   f32
        s, y     (M, N)  f32   N values in each of the others
        p        (N,)    f32
        numbers  (4 + 2 M,)
    """
    m, n = s.shape if len(s.shape) == 2 else (0, 0)
    fact = f"w is {w.spec} and g is {g.spec}; both must be f32, with the {n} values of a row of s"
    require(w.spec == g.spec and w.dtype == f32 and w.spec.size == n, fact)
    Spec((m, n)).require(s=s, y=y)
    Spec((n,)).require(p=p)
    Spec((HEAD + 1 + 2 * m,)).require(numbers=numbers)
    return w.spec, s.spec, y.spec, p.spec


@opt_step_lbfgs.kernel("numpy")
def opt_step_lbfgs_numpy(out, w, g, s, y, p, numbers):
    phase, i, length = int(numbers[0]), int(numbers[1]) % len(s), numbers[2]
    c, m = numbers[HEAD:], len(s)
    if phase == AIM:
        p[...] = c[0] * g.reshape(-1) + c[1 : m + 1] @ s + c[m + 1 :] @ y
        s[i], y[i] = w.reshape(-1), g.reshape(-1)
    elif phase == MOVE:
        w[...] = (s[i] + length * p if length else s[i]).reshape(w.shape)
    elif phase == KEEP:
        s[i], y[i] = w.reshape(-1) - s[i], g.reshape(-1) - y[i]
    elif phase == FORGET:
        s[...], y[...] = 0, 0


@opt_step_lbfgs.kernel("cpu")
def opt_step_lbfgs_cpu(out, w, g, s, y, p, numbers):
    phase, i, length = int(numbers[0]), int(numbers[1]) % len(s), float(numbers[2])
    saved_and_current = (s[i], flatten(w)), (y[i], flatten(g))
    if phase == AIM:
        kernels.update.combine(p, flatten(g), s, y, numbers[HEAD:])
        for saved, current in saved_and_current:
            np.copyto(saved, current)
    elif phase == MOVE:
        np.copyto(flatten(w), s[i])
        if length:
            kernels.update.momentum(flatten(w), p, 1.0, length)
    elif phase == KEEP:
        for saved, current in saved_and_current:
            kernels.elementwise.binary(kernels.elementwise.BINARY["sub"], saved, current, saved)
    elif phase == FORGET:
        s.fill(0)
        y.fill(0)


@opt_step_lbfgs.kernel("torch")
def opt_step_lbfgs_torch(out, w, g, s, y, p, numbers):
    phase, i, length = (numbers if on_host(numbers) else torch.tensor([AIM, 0, 0]))[:HEAD].tolist()
    i, c, m, w, g = int(i) % len(s), numbers[HEAD:], len(s), w.view(-1), g.view(-1)
    if phase == AIM:
        torch.mul(g, c[0], out=p)
        p.addmv_(s.mT, c[1 : m + 1]).addmv_(y.mT, c[m + 1 :])
        s[i], y[i] = w, g
    elif phase == MOVE:
        torch.add(s[i], p, alpha=length, out=w) if length else w.copy_(s[i])
    elif phase == KEEP:
        torch.sub(w, s[i], out=s[i])
        torch.sub(g, y[i], out=y[i])
    elif phase == FORGET:
        s.zero_()
        y.zero_()


@op(acc=5)
def lbfgs_dots(
    g: Tensor, s: Tensor, y: Tensor, p: Tensor, numbers: Tensor, acc: Tensor | None = None
) -> Spec:
    """Inner products (+ acc): of g, s_0 …, y_0 … with g, y_0 … if numbers[0] is MEASURE; only of g and p if SLOPE.

    g     (...)   f32, N values      s, y  (M, N)  f32      p  (N,)  f32
    dots  (2 M + 1, M + 1)  f32, each of them added up in f64
    """
    m, n = s.shape if len(s.shape) == 2 else (0, 0)
    is_valid = s.spec == y.spec == Spec((m, n)) and p.spec == Spec((n,)) and g.spec == Spec(g.shape)
    require(is_valid, f"s {s.spec}, y {y.spec}, p {p.spec} and g {g.spec} must be f32")
    require(g.spec.size == n, f"g is {g.spec}; it must have the {n} values of a row of s")
    require(numbers.dtype == f32, f"numbers is {numbers.spec}; it must be f32")
    return Spec((2 * m + 1, m + 1)).require(acc=acc)


@lbfgs_dots.kernel("numpy")
def lbfgs_dots_numpy(dots, g, s, y, p, numbers, acc):
    dots[...] = 0 if acc is None else acc
    g = g.reshape(1, -1)
    if numbers[0] == MEASURE:
        doubles = [x.astype(np.float64) for x in (g, s, y)]
        dots += np.concatenate(doubles) @ np.concatenate([doubles[0], doubles[2]]).T
    elif numbers[0] == SLOPE:
        dots[0, 0] += np.dot(g[0].astype(np.float64), p)


@lbfgs_dots.kernel("cpu")
def lbfgs_dots_cpu(dots, g, s, y, p, numbers, acc):
    if acc is None:
        dots.fill(0)
    elif acc is not dots:
        np.copyto(dots, acc)
    if numbers[0] == MEASURE:
        kernels.update.products(flatten(dots), flatten(g), s, y)
    elif numbers[0] == SLOPE:
        kernels.update.product(flatten(dots), flatten(g), p)


@lbfgs_dots.kernel("torch")
def lbfgs_dots_torch(dots, g, s, y, p, numbers, acc):
    phase = int(numbers[0]) if on_host(numbers) else MEASURE
    total_dots, g = to_sum_dtype(torch.zeros_like(dots)), g.view(-1)
    for chunk_start, chunk_end in chunk_bounds(len(g), CHUNK // (2 * len(s) + 1), g):
        chunk = [to_sum_dtype(x[..., chunk_start:chunk_end]) for x in (g[None], s, y, p)]
        if phase == MEASURE:
            total_dots += torch.cat(chunk[:3]) @ torch.cat(chunk[:3:2]).mT
        elif phase == SLOPE:
            total_dots[0, 0] += chunk[0][0] @ chunk[3]
    dots.copy_(total_dots if acc is None else total_dots.add_(acc))


lbfgs_dots.cost(lambda out, g, s, *inputs: Cost({"exp": 0.25 * out.spec.size * g.spec.size}))


def _numbers_constant(phase, m, i=0, length=0.0):
    return constant("numbers", np.array([phase, i, length, *(0.5 - 0.3 * np.arange(2 * m + 1))]))


@opt_step_lbfgs.samples
def opt_step_lbfgs_samples():
    for phase, m, shape in (
        (MEASURE, 1, (3,)), (AIM, 1, (17,)), (AIM, 3, (4, 9)), (AIM, 2, (70_000,)), (MOVE, 2, (33,)),
        (MOVE, 3, (300, 70)), (KEEP, 2, (5, 7)), (FORGET, 2, (19,)),
    ):  # fmt: skip
        n = int(np.prod(shape))
        s, y, p = state("s", (m, n)), state("y", (m, n)), state("p", (n,))
        numbers = _numbers_constant(phase, m, m - 1, 0.5)
        yield from opt_step_lbfgs(weight("w", shape), input("g", shape), s, y, p, numbers)


@lbfgs_dots.samples
def lbfgs_dots_samples():
    cases = (MEASURE, 1, (3,)), (MEASURE, 3, (7, 11)), (MEASURE, 2, (70_000,)), (SLOPE, 2, (133,))
    for phase, m, shape in cases:
        n = int(np.prod(shape))
        s, y, p = state("s", (m, n)), state("y", (m, n)), state("p", (n,))
        yield lbfgs_dots(input("g", shape), s, y, p, _numbers_constant(phase, m))
    vectors = input("g", (5,)), state("s", (1, 5)), state("y", (1, 5)), state("p", (5,))
    yield lbfgs_dots(*vectors, _numbers_constant(SLOPE, 1), input("acc", (3, 2)))
