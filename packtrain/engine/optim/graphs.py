"""Graphs of a training step: forward, backward, clipping and updates in one, in two passes, or by micro-batches.

Optimizer states are leaves and the numbers of a step inputs, so one plan serves every step.
"""

from collections.abc import Collection, Iterable, Mapping

from packtrain.distributed import BUCKET
from packtrain.dtypes import i64
from packtrain.engine import ops
from packtrain.engine.autodiff import Keep, differentiate, differentiate_twice
from packtrain.engine.graph import Graph
from packtrain.engine.optim import over_ranks
from packtrain.engine.optim.optimizer import Optimizer, StepInputs
from packtrain.engine.optim.over_ranks import RankShare
from packtrain.engine.tensor import GraphError, Tensor, input, named, state

ROUNDING = "rounding"  # the input for stochastic rounding of bf16 weights: seed and step

ForwardGradients = dict[Tensor, Tensor] | None
Pair = tuple[Tensor, Tensor]  # a weight and its gradient
TwoPassSplit = tuple[Collection[Tensor], Collection[Tensor]]  # see `training_graph`


def training_graph(
    outputs: Mapping[str, Tensor], trained: Collection[Tensor], optimizer: Optimizer, *, keep: Keep = None,
    max_norm: float | None = None, max_value: float | None = None, inner: ForwardGradients = None,
    two_pass: TwoPassSplit | None = None,
) -> Graph:  # fmt: skip
    """Return the graph of one step: forward, backward and update of outputs["loss"]; it also outputs `squares`.

    squares    the sum of squares of all gradients: the gradient norm before clipping, squared
    keep       forward values to save, see differentiate
    max_norm   clips gradients by global norm, for which all must be complete first; None applies each gradient as
               soon as it is complete, so that no two need memory at once. A step whose loss or gradient is not
               finite changes nothing; without max_norm only from the first such gradient on.
    max_value  then clips each value of a gradient
    inner      filled with gradients of forward values, see differentiate
    two_pass   with max_norm: the weights whose gradients do not wait for the norm, as a second backward pass computes
               them again, and the forward values behind which that pass begins
    """
    loss, builder = outputs["loss"], _UpdateBuilder(optimizer, outputs["loss"], max_norm, max_value)
    _check_trained(trained)
    if max_norm is None:
        differentiate(loss, list(trained), keep, builder.measure_and_apply, inner)
    elif two_pass:
        sinks = builder.add_squares_of, builder.write_update
        differentiate_twice(loss, list(trained), *two_pass, keep, *sinks, inner)
    else:
        for w, g in differentiate(loss, list(trained), keep, builder.add_squares_of, inner).items():
            builder.write_update(w, g)
    return Graph({**outputs, "squares": named("squares", builder.squares[-1])}, builder.handles)


def measuring_graph(
    outputs: Mapping[str, Tensor], trained: Collection[Tensor], *, keep: Keep = None, inner: ForwardGradients = None,
) -> Graph:  # fmt: skip
    """Return the first pass of a step that clips without storing gradients: outputs and `squares`, no updates. With an
    untied head, whose gradient would wait for the norm, two full passes need least (`15m`: 307.1 instead of 335.7 MiB);
    with a tied head, going back twice (`two_pass`) takes as little in two thirds of the time."""
    _check_trained(trained)
    squares = list[Tensor]()

    def add_squares_of(w: Tensor, g: Tensor) -> None:
        _add_squares(squares, g)

    differentiate(outputs["loss"], list(trained), keep, add_squares_of, inner)
    return Graph({**outputs, "squares": named("squares", squares[-1])})


def applying_graph(
    outputs: Mapping[str, Tensor], trained: Collection[Tensor], optimizer: Optimizer, *, keep: Keep = None,
    max_norm: float | None = None, max_value: float | None = None, inner: ForwardGradients = None,
) -> Graph:  # fmt: skip
    """Return the second pass of a step that clips without storing gradients: gradients again, each applied at once. The
    input `squares` () is what the first pass, see measuring_graph, returned."""
    _check_trained(trained)
    builder = _UpdateBuilder(optimizer, outputs["loss"], max_norm, max_value)
    builder.squares.append(input("squares", ()))
    differentiate(outputs["loss"], list(trained), keep, builder.write_update, inner)
    return Graph(outputs, builder.handles)


def accumulation_graph(
    outputs: Mapping[str, Tensor], trained: Collection[Tensor], *, keep: Keep = None, inner: ForwardGradients = None,
    share: RankShare | None = None,
) -> Graph:  # fmt: skip
    """Return the graph of one micro-batch: forward, backward, and each gradient added to its state `g/<name>`.

    The input `fresh` () is 1 for the first micro-batch of a step, which resets the sums, else 0.

    share  store only this rank's parts of the sums over all ranks, `g/part/<name>`, where each rank has a part
    """
    _check_trained(trained)
    fresh, handles, pending_sums = input("fresh", ()), list[Tensor](), list[Pair]()

    def finish_pending() -> None:
        handles.extend(over_ranks.wait_for_sums(*pending_sum) for pending_sum in pending_sums)
        pending_sums.clear()

    def add_gradient(w: Tensor, g: Tensor) -> None:
        local_sum = over_ranks.local_gradient_sum(w, share)
        if local_sum is None or share is None:
            handles.append(ops.accumulate(_gradient_sum(w), g, fresh))
            return
        if sum(one.spec.size for _, one in pending_sums) + g.spec.size > BUCKET:
            finish_pending()
        pending_sums.append((over_ranks.reduce_scatter(local_sum[1], g, fresh, share=share), g))

    differentiate(outputs["loss"], list(trained), keep, add_gradient, inner)
    finish_pending()
    return Graph(outputs, handles)


def update_graph(
    trained: Collection[Tensor], optimizer: Optimizer, share: RankShare | None = None, is_scattered: bool = False,
    /, *, max_norm: float | None = None, max_value: float | None = None,
) -> Graph:  # fmt: skip
    """Return the graph that ends an accumulated step: updates from the sums `g/<name>`; input `loss` () is their loss.

    share         update only this rank's parts of the weights, and store moments only for these
    is_scattered  the sums are parts, too, see `accumulation_graph`
    """
    _check_trained(trained)
    builder = _UpdateBuilder(optimizer, input("loss", ()), max_norm, max_value)
    local_sums = {
        w: over_ranks.local_gradient_sum(w, share) if is_scattered else None for w in trained
    }
    local_sum_pairs = [sum_pair for sum_pair in local_sums.values() if sum_pair is not None]
    full_sums = [(w, _gradient_sum(w)) for w, sum_pair in local_sums.items() if sum_pair is None]
    for w, g in local_sum_pairs:
        builder.add_squares_of(w, g)
    if local_sum_pairs:
        builder.squares.append(over_ranks.all_reduce(builder.squares[-1]))
    for w, g in full_sums:
        builder.add_squares_of(w, g)
    local_full_sums = full_sums if share is None else over_ranks.local_parts(full_sums, share)
    extra_outputs, handles = builder.measured_update([*local_sum_pairs, *local_full_sums])
    return Graph({"squares": named("squares", builder.squares[-1]), **extra_outputs}, handles)


def _gradient_sum(w: Tensor) -> Tensor:
    return state(f"g/{w.name}", w.shape, role="sum")


def _add_squares(squares: list[Tensor], g: Tensor) -> None:
    """Append to `squares` the sum of squares of all gradients so far, g included, for clipping by their norm. Norms
    from Gram matrices (|dy^T x|^2 from dy dy^T and x x^T) cost as much as the gradients once there are as many tokens
    as the model is wide."""
    squares.append(ops.sum_squares(g, squares[-1] if squares else None))


def _check_trained(trained: Collection[Tensor]) -> None:
    if not trained:
        raise GraphError("training needs at least one tensor to train")


class _UpdateBuilder:
    """Writes the end of a step: the norm of all gradients, the clipping factor (gate) that follows, and the updates."""

    def __init__(
        self, optimizer: Optimizer, loss: Tensor, max_norm: float | None, max_value: float | None
    ) -> None:
        self.optimizer, self.loss = optimizer, loss
        self.max_norm = float("inf") if max_norm is None else max_norm
        self.max_value = max_value
        self.hyper, self.rounding = optimizer.leaf(), input(ROUNDING, (2,), i64)
        self.squares: list[Tensor] = []
        self.handles: list[Tensor] = []
        self.clip_gate: Tensor | None = None

    def add_squares_of(self, w: Tensor, g: Tensor) -> None:
        _add_squares(self.squares, g)

    def measured_update(self, pairs: Iterable[Pair]) -> tuple[dict[str, Tensor], list[Tensor]]:
        return self.optimizer.measured(*self._clip_pairs(pairs, self._make_clip_gate()))

    def write_update(self, w: Tensor, g: Tensor) -> None:
        self.clip_gate = self.clip_gate or self._make_clip_gate()
        self._update([(w, g)], self.clip_gate)

    def measure_and_apply(self, w: Tensor, g: Tensor) -> None:
        self.add_squares_of(w, g)
        self._update([(w, g)], self._make_clip_gate())

    def _update(self, pairs: Iterable[Pair], gate: Tensor) -> None:
        self.handles.extend(self.optimizer.updates(*self._clip_pairs(pairs, gate)))

    def _clip_pairs(self, pairs: Iterable[Pair], gate: Tensor) -> tuple[Iterable[Pair], StepInputs]:
        """Return pairs (weight, gradient), clipped to `max_value` unless None, and the other inputs of the update."""
        if self.max_value is not None:
            max_value, factor = self.max_value, gate
            pairs = (
                (w, ops.clamp(ops.mul(g, factor), low=-max_value, high=max_value)) for w, g in pairs
            )
            gate = ops.div(gate, gate)  # 1, or NaN
        return pairs, StepInputs(self.hyper, gate, self.rounding)

    def _make_clip_gate(self) -> Tensor:
        finite_squares = ops.add(self.squares[-1], ops.scale(self.loss, by=0.0))
        return ops.clip_gate(finite_squares, max_norm=self.max_norm)
