"""Reverse-mode differentiation: from a loss to tensors that compute its gradients.

Gradients are ordinary calls written after the forward ones, so they are planned and run like any other. New calls
recompute forward values that are not saved, just before the backward pass of their segment."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from packtrain.dtypes import TRAINABLE, f32
from packtrain.engine.call_site import written_for
from packtrain.engine.graph import Graph
from packtrain.engine.ops.elementwise import add
from packtrain.engine.ops.stored_values import rereads_stored_weight
from packtrain.engine.tensor import Call, GraphError, RequirementError, Tensor, constant, named

GradientSink = Callable[[Tensor, Tensor], None]
Gradients = dict[Tensor, Tensor]
Keep = Collection[Tensor] | Mapping[Tensor, int] | None


def differentiate(
    loss: Tensor, wrt: Sequence[Tensor], keep: Keep = None, sink: GradientSink | None = None,
    inner: Gradients | None = None,
) -> Gradients:  # fmt: skip
    """Return gradients of a scalar loss for each tensor in `wrt`, named `d/<name>`.

    keep   forward values to save for the backward pass; others are recomputed from them, segment by segment
           (activation checkpointing; Chen et al. 2016, arXiv 1604.06174). None saves all. Leaves, results of writing
           ops, values read from a leaf before a write, and everything after the last value of `keep` are always saved,
           so an empty `keep` recomputes nothing. Values read back from bf16 (cast) and results of `stored_sum` are
           recomputed unless `keep` names them. A mapping gives ranks: rank 0 or less is saved by the forward pass,
           rank 1 while the segment after a saved value is recomputed, rank 2 while that of a rank 1 value is, and so
           on; values without a rank are recomputed last, just before they are needed.
    sink   called with (tensor, gradient) as soon as a gradient is complete and every read of the tensor has been
           written: an update written there uses the gradient at once, so that few gradients live together
    inner  filled with the gradient of every forward value that has one

    Raises GraphError: the loss is no scalar, does not depend on a tensor, a tensor is neither f32 nor
    bf16, or an op has no gradient (all named).
    """
    calls, active, seed = _validate(loss, wrt)
    recompute = _Recomputation(calls, keep)
    return _Backward(calls, active, wrt, recompute, sink, inner, seed).walk(calls)


def differentiate_twice(
    loss: Tensor, wrt: Sequence[Tensor], repeated_wrt: Collection[Tensor], frontier: Collection[Tensor], keep: Keep,
    first_sink: GradientSink, sink: GradientSink, inner: Gradients | None = None,
) -> None:  # fmt: skip
    """Pass each tensor of `wrt` and its gradient to two sinks; gradients for `repeated_wrt` are computed twice.
    `first_sink` gets every gradient in a first backward pass, to measure their norm. Afterwards `sink` gets all
    gradients once more, but for `repeated_wrt` from a second pass that starts at the gradients of `frontier`, so that
    they need no memory in between. All calls that read `repeated_wrt` come before `frontier`. Others: see
    differentiate."""
    calls, active, seed = _validate(loss, wrt)
    last_serial = max(t.call.serial for t in frontier if t.call is not None)
    prefix = [call for call in calls if call.serial <= last_serial]
    first_pass = _Backward(calls, active, wrt, _Recomputation(calls, keep), first_sink, inner, seed)
    first_pass.walk(calls[len(prefix) :])
    active = _dependents(prefix, repeated_wrt)
    arrived = {t: gradient for t, gradient in first_pass.partial.items() if t in active}
    for t, gradient in first_pass.walk(prefix).items():  # continues; returns both parts
        if t not in repeated_wrt:
            sink(t, gradient)
    recompute = _Recomputation(calls, keep)
    _Backward(prefix, active, list(repeated_wrt), recompute, sink, None, arrived).walk(prefix)


def pull_back(
    calls: Sequence[Call], gradients: Gradients, wrt: Sequence[Tensor], sink: GradientSink
) -> None:
    """Write the backward pass of `calls` from `gradients` of results; pass (tensor, gradient) of `wrt` to `sink`."""
    recompute = _Recomputation(calls, None)
    _Backward(calls, _dependents(calls, wrt), wrt, recompute, sink, None, {**gradients}).walk(calls)


def _validate(loss: Tensor, wrt: Sequence[Tensor]) -> tuple[Sequence[Call], set[Tensor], Gradients]:
    """Check arguments; return the calls that lead to the loss, tensors that depend on `wrt`, and {loss: constant 1}."""
    if loss.shape != () or loss.dtype != f32:
        raise GraphError(f"the loss is {loss.spec}; only a scalar f32[] has a gradient")
    calls = Graph([loss]).calls
    packed = ", ".join(t.label for t in wrt if t.dtype not in TRAINABLE)
    if packed:
        raise GraphError(f"only f32 and bf16 tensors have gradients; {packed} cannot be trained")
    active = _dependents(calls, wrt)
    read_tensors = {t for call in calls for t in call.reads} | {loss}
    unused_names = [t.label for t in wrt if t not in read_tensors]
    if unused_names:
        raise GraphError(f"the loss does not depend on {', '.join(unused_names)}")
    missing_vjp = [c for c in calls if c.op.vjp_rule is None and not active.isdisjoint(c.results)]
    if missing_vjp:
        lines = [f"    {c.results[0]}" for c in missing_vjp]
        raise GraphError("\n".join([f"no gradient (vjp) for {len(missing_vjp)} calls:", *lines]))
    return calls, active, {loss: constant("one", np.ones(()))}


def _dependents(calls: Iterable[Call], wrt: Iterable[Tensor]) -> set[Tensor]:
    """Return the tensors that depend on `wrt` differentiably: f32 and bf16 results, not integers."""
    active = set(wrt)
    for call in calls:
        if not active.isdisjoint(call.inputs):
            for t in call.results:
                if t.spec.dtype in TRAINABLE:
                    active.add(t)
    return active


class _Recomputation:
    """Gives the backward pass forward values: those saved as they are, others by calls that compute them again."""

    def __init__(self, calls: Sequence[Call], keep: Keep) -> None:
        self.forward_calls = set(calls)
        self.ranks = dict(keep) if isinstance(keep, Mapping) else dict.fromkeys(keep or (), 0)
        self.max_rank = max(self.ranks.values(), default=0) + 1
        kept_tensors = (t for t, rank in self.ranks.items() if rank <= 0)
        # values after the last saved one stay, because their backward pass begins at once
        self.last_kept_serial = max((t.call.serial for t in kept_tensors if t.call), default=-1)
        self.copies = dict[Tensor | None, Tensor | None]()
        self.unsaved = self._unsaved_values(calls)

    def _unsaved_values(self, calls: Sequence[Call]) -> set[Tensor]:
        """Return the results of these calls that are not saved, and so recomputed if the backward pass reads them."""
        newest_handles = {t.base: t for call in calls if call.op.writes for t in call.results}
        unsaved = set[Tensor]()
        for call in calls:
            is_past_kept = call.serial > self.last_kept_serial and not rereads_stored_weight(call)
            reads = call.reads if newest_handles else ()
            stale = [x for x in reads if newest_handles.get(x.base, x.handle) is not x.handle]
            if not (is_past_kept or call.op.writes or stale):
                unsaved.update([t for t in call.results if self.ranks.get(t, 1) > 0])
        return unsaved

    def rank(self, t: Tensor) -> int:
        return self.ranks.get(t, self.max_rank)

    def forward_values(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return these forward values as tensors that the backward pass may read; writes calls for values not saved."""
        while missing_calls := self._missing_calls(tensors):
            self._recompute(missing_calls)
        return [*map(self.copies.get, tensors, tensors)]

    def _missing_calls(self, tensors: Iterable[Tensor | None]) -> dict[Call, None]:
        """Return, as keys, the forward calls that must be written again, so that these tensors are available."""
        missing_calls: dict[Call, None] = {}
        stack = list(tensors)
        while stack:
            t = stack.pop()
            if t in self.unsaved and t not in self.copies and t.call not in missing_calls:
                assert t.call is not None
                missing_calls[t.call] = None
                stack.extend(t.call.reads)
        return missing_calls

    def _recompute(self, missing_calls: dict[Call, None]) -> None:
        """Write calls that compute the values of the lowest rank among those missing; drop other values on the way."""
        results = [t for call in missing_calls for t in call.results]
        absent_tensors = [t for t in results if t in self.unsaved and t not in self.copies]
        lowest_rank = min(map(self.rank, absent_tensors))
        targets = [t for t in absent_tensors if self.rank(t) == lowest_rank]
        temporary_values = dict[Tensor, Tensor]()
        for call in sorted(self._missing_calls(targets), key=attrgetter("serial")):
            for old, new in zip(call.results, self._copy_call(call, temporary_values), strict=True):
                if old.name:
                    named(f"{old.name} again", new)
                if old in self.unsaved:
                    (self.copies if self.rank(old) == lowest_rank else temporary_values)[old] = new

    def _copy_call(self, call: Call, passing: Mapping[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Write the call again, each input replaced by its copy in `passing`, else an earlier copy; return results."""
        inputs = [t if t is None else passing.get(t) or self.copies.get(t, t) for t in call.inputs]
        with written_for(call.origin, "backward" if rereads_stored_weight(call) else "recomputed"):
            return as_tuple(call.op(*inputs, **call.attrs))


def as_tuple(op_result: Any) -> tuple[Tensor, ...]:
    """Return what an op returned, a tensor or a tuple of tensors, as a tuple."""
    return op_result if isinstance(op_result, tuple) else (op_result,)


class _Backward:
    """One walk over calls in reverse that writes gradient calls; gradients are collected until no more terms follow."""

    def __init__(
        self, calls: Sequence[Call], active: set[Tensor], wrt: Sequence[Tensor], recompute: _Recomputation,
        sink: GradientSink | None, inner: Gradients | None, partial: Gradients,
    ) -> None:  # fmt: skip
        self.inner, self.partial = inner, partial
        self.calls, self.active, self.recompute, self.sink = calls, active, recompute, sink
        self.wrt = list(dict.fromkeys(wrt))
        self.gradients: Gradients = {}
        self.first_use = self._first_uses()
        self._pass_to_sink(None)

    def _first_uses(self) -> dict[Call | None, list[Tensor]]:
        """Return {call: tensors of `wrt` that this call is the first to read}: after its backward pass, their gradients
        are complete. Tensors that no call reads have the key None."""
        targets, first_readers = set(self.wrt), dict[Tensor, Call]()
        for call in self.calls:
            for t in call.reads:
                if t in targets:
                    first_readers.setdefault(t, call)
        complete_after: dict[Call | None, list[Tensor]] = {}
        for t in self.wrt:
            complete_after.setdefault(first_readers.get(t), []).append(t)
        return complete_after

    def walk(self, calls: Sequence[Call]) -> Gradients:
        """Write the backward pass of these calls, the last first; return the gradients for `wrt` that are complete."""
        for call in reversed(calls):
            if not self.partial.keys().isdisjoint(call.results):
                self._differentiate_call(call)
            self._pass_to_sink(call)
        return {t: self.gradients[t] for t in self.wrt if t in self.gradients}

    def _differentiate_call(self, call: Call) -> None:
        """Write the gradients of a call's inputs by its op's rule, added to those of other calls."""
        dy = [self.partial.pop(t, None) for t in call.results]
        for result, gradient in zip(call.results, dy, strict=True):
            if result.name and gradient is not None and gradient.name is None:
                named(f"d/{result.name}", gradient)
            if self.inner is not None and gradient is not None:
                self.inner[result] = gradient
        num_results = len(call.results)
        forward_values = self.recompute.forward_values([*call.results, *call.inputs])
        y, inputs = forward_values[:num_results], forward_values[num_results:]
        rule: Any = call.op.vjp_rule
        rule_args = (dy, y) if call.returns_tuple else (dy[0], y[0])
        takes_active, active = call.op.takes_active, self.active
        options = {"active": [t in active for t in call.inputs]} if takes_active else {}
        with written_for(call.origin, "backward"):
            try:
                gradients = list(rule(*rule_args, *inputs, **call.attrs, **options))
                for t, d in zip(call.inputs, gradients, strict=False):
                    if t in self.active and (d is None or d.spec.shape != t.spec.shape):
                        if d is None:
                            raise RequirementError(f"no gradient for its input {t.label}")
                        raise RequirementError(f"its gradient for {t.label} {t.spec} is {d.spec}")
            except RequirementError as unmet:
                raise GraphError(f"{call.op.name}: {unmet}\n  at {call.location}") from None
            newest_serial = max([d.call.serial for d in dy if d is not None and d.call], default=-1)
            folded_inputs = self._fold_into_acc(call, gradients, newest_serial)
            for i, t in enumerate(call.inputs):
                if t is not None and t in self.active:
                    earlier = None if i in folded_inputs else self.partial.get(t)
                    d = gradients[i]
                    self.partial[t] = d if earlier is None else add(earlier, d)

    def _fold_into_acc(self, call: Call, gradients: list[Tensor | None], newest: int) -> set[int]:
        """Let ops with an input `acc` add their gradients to earlier gradients of an input of `call`, which spares an
        addition; return the indices of these inputs. The op's call is replaced if it was written after call number
        `newest`; `gradients`, one or None for each input of `call`, then gets all results of the replacement."""
        folded_inputs = set()
        for i, t in enumerate(call.inputs):
            d = gradients[i]
            if t is None or d is None or t not in self.partial or call.inputs.index(t) != i:
                continue
            producer = d.call
            if producer is None or producer.serial <= newest or d.index or producer.op.acc is None:
                continue
            if producer.inputs[producer.op.acc] is not None or gradients.count(d) > 1:
                continue  # accumulates already, or is another input's gradient, too, which must not change
            inputs = list(producer.inputs)
            inputs[producer.op.acc] = self.partial[t]
            replacement = producer.op(*inputs, **producer.attrs)
            gradients[:] = [
                g if g is None or g.call is not producer else as_tuple(replacement)[g.index]
                for g in gradients
            ]
            folded_inputs.add(i)
        return folded_inputs

    def _pass_to_sink(self, call: Call | None) -> None:
        """Name the gradients of `wrt` that are complete after `call`'s backward pass; pass them to the sink."""
        for t in self.first_use.get(call, ()):
            if t not in self.partial:
                fact = "every path from it to the loss has gradient zero"
                raise GraphError(f"no gradient reaches {t.label}: {fact}")
            gradient = self.partial[t]
            if gradient.name is None:
                named(f"d/{t.name or (t.call.op.name if t.call else 'leaf')}", gradient)
            self.gradients[t] = gradient
            if self.sink is not None:
                self.sink(t, gradient)
