"""The graphs of a step: forward, backward, gradient clipping and updates in one, in two passes, or by micro-batches.

Optimizer states are leaves and the numbers of a step inputs, so one plan serves every step.
"""

from collections.abc import Collection, Iterable, Mapping

from packtrain.distributed import BUCKET
from packtrain.dtypes import i64
from packtrain.engine import ops
from packtrain.engine.autodiff import Keep, differentiate, differentiate_twice
from packtrain.engine.graph import Graph
from packtrain.engine.optim.optimizer import Given, Optimizer
from packtrain.engine.optim.over_ranks import all_reduce, arrive, reduce_scatter
from packtrain.engine.optim.parts import Share, own_sum, parts
from packtrain.engine.tensor import GraphError, Tensor, input, named, state

ROUNDING = "rounding"  # the input for stochastic rounding of bf16 weights: seed and step

Inner = dict[Tensor, Tensor] | None
Pair = tuple[Tensor, Tensor]  # a weight and its gradient
Twice = tuple[Collection[Tensor], Collection[Tensor]]  # see `training`


def training(
    outputs: Mapping[str, Tensor],
    trained: Collection[Tensor],
    optimizer: Optimizer,
    *,
    keep: Keep = None,
    max_norm: float | None = None,
    max_value: float | None = None,
    inner: Inner = None,
    twice: Twice | None = None,
) -> Graph:
    """The graph of one step: forward, backward and update of outputs["loss"]; it also outputs `squares`.

    squares  the sum of squares of all gradients: the gradient norm before clipping, squared
    keep     forward values to keep, see differentiate
    max_norm a number clips gradients by global norm, for which all must be complete first; None applies each
             gradient as soon as it is complete, so that no two need memory at once. A step whose loss or gradient
             is not finite changes nothing; without max_norm only from the first such gradient on.
    max_value a number then clips each value of a gradient to it
    inner    filled with gradients of forward values, see differentiate
    twice    with max_norm: weights whose gradients do not wait for the norm, as a second backward pass computes them
             again; and the forward values behind which it begins
    """
    loss, update = outputs["loss"], _Update(optimizer, outputs["loss"], max_norm, max_value)
    _check(trained)
    if max_norm is None:
        differentiate(loss, list(trained), keep, update.measure_and_apply, inner)
    elif twice:
        sinks = update.measure, update.apply
        differentiate_twice(loss, list(trained), *twice, keep, *sinks, inner)
    else:
        for w, g in differentiate(loss, list(trained), keep, update.measure, inner).items():
            update.apply(w, g)
    return Graph({**outputs, "squares": named("squares", update.squares[-1])}, update.handles)


def measuring(
    outputs: Mapping[str, Tensor],
    trained: Collection[Tensor],
    *,
    keep: Keep = None,
    inner: Inner = None,
) -> Graph:
    """The first pass of a step that clips without storing gradients: outputs and `squares`, no updates."""
    _check(trained)
    squares = list[Tensor]()

    def measure(w: Tensor, g: Tensor) -> None:
        _measure(squares, g)

    differentiate(outputs["loss"], list(trained), keep, measure, inner)
    return Graph({**outputs, "squares": named("squares", squares[-1])})


def applying(
    outputs: Mapping[str, Tensor],
    trained: Collection[Tensor],
    optimizer: Optimizer,
    *,
    keep: Keep = None,
    max_norm: float | None = None,
    max_value: float | None = None,
    inner: Inner = None,
) -> Graph:
    """The second pass: the same gradients, each applied at once; input `squares` () is from the first pass."""
    _check(trained)
    update = _Update(optimizer, outputs["loss"], max_norm, max_value)
    update.squares.append(input("squares", ()))
    differentiate(outputs["loss"], list(trained), keep, update.apply, inner)
    return Graph(outputs, update.handles)


def accumulating(
    outputs: Mapping[str, Tensor],
    trained: Collection[Tensor],
    *,
    keep: Keep = None,
    inner: Inner = None,
    share: Share | None = None,
) -> Graph:
    """Gradient accumulation, one micro-batch: forward, backward, and each gradient added to its state `g/<name>`.

    The input `fresh` () is 1 for the first micro-batch of a step, which resets the sums, else 0.

    share  keep only this process's parts of the sums over all ranks, `g/part/<name>`, where each of them has one
    """
    _check(trained)
    fresh, handles, leaving = input("fresh", ()), list[Tensor](), list[Pair]()

    def settle() -> None:
        handles.extend(arrive(*one) for one in leaving)
        leaving.clear()

    def add(w: Tensor, g: Tensor) -> None:
        local_sum = own_sum(w, share)
        if local_sum is None or share is None:
            handles.append(ops.accumulate(_sum_of(w), g, fresh))
            return
        if sum(one.spec.size for _, one in leaving) + g.spec.size > BUCKET:
            settle()
        leaving.append((reduce_scatter(local_sum[1], g, fresh, share=share), g))

    differentiate(outputs["loss"], list(trained), keep, add, inner)
    settle()
    return Graph(outputs, handles)


def updating(
    trained: Collection[Tensor],
    optimizer: Optimizer,
    share: Share | None = None,
    scatter: bool = False,
    /,
    *,
    max_norm: float | None = None,
    max_value: float | None = None,
) -> Graph:
    """The graph that ends an accumulated step: updates from the sums `g/<name>`; input `loss` () is their loss.

    share    update only this process's parts of the weights, and keep moments for no others
    scatter  the sums are parts, too, see `accumulating`
    """
    _check(trained)
    update = _Update(optimizer, input("loss", ()), max_norm, max_value)
    local_sums = {w: own_sum(w, share) if scatter else None for w in trained}
    local_pairs = [pair for pair in local_sums.values() if pair is not None]
    sums = [(w, _sum_of(w)) for w, pair in local_sums.items() if pair is None]
    for w, g in local_pairs:
        update.measure(w, g)
    if local_pairs:
        update.squares.append(all_reduce(update.squares[-1]))
    for w, g in sums:
        update.measure(w, g)
    extra_outputs, handles = update.measured(
        [*local_pairs, *(sums if share is None else parts(sums, share))]
    )
    return Graph({"squares": named("squares", update.squares[-1]), **extra_outputs}, handles)


def _sum_of(w: Tensor) -> Tensor:
    return state(f"g/{w.name}", w.shape, role="sum")


def _measure(squares: list[Tensor], g: Tensor) -> None:
    """Add to the running sum of squares of all gradients."""
    squares.append(ops.sum_squares(g, squares[-1] if squares else None))


def _check(trained: Collection[Tensor]) -> None:
    if not trained:
        raise GraphError("training needs at least one tensor to train")


class _Update:
    """Builds the end of a step: the global gradient norm, the clipping gate computed from it, and the updates."""

    def __init__(
        self, optimizer: Optimizer, loss: Tensor, max_norm: float | None, max_value: float | None
    ) -> None:
        self.optimizer, self.loss = optimizer, loss
        self.max_norm = float("inf") if max_norm is None else max_norm
        self.max_value = max_value
        self.hyper, self.rounding = optimizer.leaf(), input(ROUNDING, (2,), i64)
        self.squares: list[Tensor] = []
        self.handles: list[Tensor] = []
        self.clip: Tensor | None = None

    def measure(self, w: Tensor, g: Tensor) -> None:
        _measure(self.squares, g)

    def measured(self, pairs: Iterable[Pair]) -> tuple[dict[str, Tensor], list[Tensor]]:
        return self.optimizer.measured(*self._clipped(pairs, self._gate()))

    def apply(self, w: Tensor, g: Tensor) -> None:
        self.clip = self.clip or self._gate()
        self._update([(w, g)], self.clip)

    def measure_and_apply(self, w: Tensor, g: Tensor) -> None:
        self.measure(w, g)
        self._update([(w, g)], self._gate())

    def _update(self, pairs: Iterable[Pair], gate: Tensor) -> None:
        self.handles.extend(self.optimizer.updates(*self._clipped(pairs, gate)))

    def _clipped(self, pairs: Iterable[Pair], gate: Tensor) -> tuple[Iterable[Pair], Given]:
        if self.max_value is not None:
            max_value, factor = self.max_value, gate
            pairs = (
                (w, ops.clamp(ops.mul(g, factor), low=-max_value, high=max_value)) for w, g in pairs
            )
            gate = ops.div(gate, gate)  # 1, or NaN
        return pairs, Given(self.hyper, gate, self.rounding)

    def _gate(self) -> Tensor:
        finite = ops.add(self.squares[-1], ops.scale(self.loss, by=0.0))
        return ops.clip_gate(finite, max_norm=self.max_norm)
