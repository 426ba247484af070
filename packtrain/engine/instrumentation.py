"""Runs a bound plan slowly: the same kernels, with watchers and checks, as the flags of `common.debug` say."""

import fnmatch
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from packtrain.common.debug import flags
from packtrain.dtypes import u8
from packtrain.engine.backends import Backend
from packtrain.engine.memory_plan import ArenaKey, Plan
from packtrain.engine.placement import Placed
from packtrain.engine.step import BEGIN_COPY, KernelStep
from packtrain.engine.tensor import Spec, Tensor

CHECKS = frozenset({"time", "nan", "poison", "compare"})  # the flags that need an Observer
NAN_BYTE = 255  # in each byte of a float
TOLERANCE = 1e-4  # largest difference between kernel and specification, over the largest value

See = Callable[[str, np.ndarray], None]
Run = Callable[[], Any]  # returns None, or a quicker call for later runs, see run_replayable


@dataclass(frozen=True, slots=True)
class BoundStep:
    """A step of a placed graph with the arrays it reads and writes, and `run`, which calls its kernel on these."""

    step: KernelStep
    results: tuple[Any, ...]
    inputs: tuple[Any, ...]
    workspace: tuple[Any, ...]
    run: Run


def print_stages(placed: Placed, plan: Plan) -> None:
    """Print graph, placement and plan to stderr, each if its debug flag is on."""
    for flag, stage in (("graph", placed.graph), ("place", placed), ("plan", plan)):
        if flag in flags():
            print(stage, file=sys.stderr)


class Observer:
    """Runs the steps of an executor one by one, with the checks of the debug flags, and calls watchers of tensors.

    arenas    buffers by space and name
    watchers  pairs of a shell pattern of tensor names and a function of name and value
    on        debug flags of the checks to make
    """

    def __init__(
        self, placed: Placed, plan: Plan, steps: Sequence[BoundStep], arenas: Mapping[ArenaKey, Any],
        watchers: Sequence[tuple[str, See]], on: frozenset[str],
    ) -> None:  # fmt: skip
        self.placed, self.plan, self.steps = placed, plan, steps
        self.arenas, self.watchers, self.on = arenas, watchers, on
        self.names = placed.names
        self.op_seconds: dict[str, float] = defaultdict(float)
        self.freed_arrays = self._arrays_freed_after() if "poison" in on else {}

    def calls(self, *, updates: bool = True) -> list[Run]:
        """Return a function per step that runs and checks it; `updates=False` leaves out steps that write leaves."""
        steps = enumerate(self.steps)
        return [partial(self._run_step, i, s) for i, s in steps if updates or not s.step.op.writes]

    def print_op_times(self) -> None:
        """Print the seconds that each op took to stderr, if the debug flag `time` is on."""
        if "time" in self.on:
            total = sum(self.op_seconds.values())
            for name, seconds in sorted(self.op_seconds.items(), key=lambda item: -item[1]):
                print(f"{seconds * 1e3:10.3f} ms {seconds / total:6.1%}  {name}", file=sys.stderr)

    def _run_step(self, i: int, bound: BoundStep) -> None:
        """Run step i with the checks whose debug flags are on."""
        backend, saved_inputs = bound.step.backend, []
        if self.on & {"compare", "nan"}:
            home, pairs = self.placed.home, zip(bound.step.inputs, bound.inputs, strict=True)
            saved_inputs = [None if t is None else home[t.base].read(x) for t, x in pairs]
        if "poison" in self.on:
            self._poison_unwritten(bound)
        start_time = time.perf_counter()
        bound.run()
        backend.sync()
        self.op_seconds[bound.step.op.name] += time.perf_counter() - start_time
        if "nan" in self.on:
            self._check_finite(bound, saved_inputs)
        if "compare" in self.on:
            self._compare_with_specification(bound, saved_inputs)
        for pattern, callback in self.watchers:
            for t, array in zip(bound.step.results, bound.results, strict=True):
                has_value = array is not None and bound.step.op is not BEGIN_COPY
                if has_value and fnmatch.fnmatchcase(self.names[t], pattern):
                    callback(self.names[t], backend.read(array))
        for array_backend, array in self.freed_arrays.get(i, ()):
            array_backend.fill(array, NAN_BYTE)

    # ---- poison

    def _poison_unwritten(self, bound: BoundStep) -> None:
        """Fill what a step will write with NaN, so that a kernel that leaves out values is noticed."""
        step, backend = bound.step, bound.step.backend
        for i, array in enumerate(bound.results):
            aliased = [bound.inputs[k] for k in (*step.op.inplace.get(i, ()), *step.op.writes)]
            if array is not None and not any(
                x is not None and backend.overlap(array, x) for x in aliased
            ):
                backend.fill(array, NAN_BYTE)
        for array in bound.workspace:
            backend.fill(array, NAN_BYTE)

    def _arrays_freed_after(self) -> dict[int, list[tuple[Backend, Any]]]:
        """Return, by step, arrays (with backends) that no later step needs: the flag `poison` fills them with NaN."""
        freed: dict[int, list[tuple[Backend, Any]]] = {}
        outputs = {self.names[t.base] for t in self.placed.graph.outputs.values()}
        backends = {buffer.space: buffer for buffer in self.placed.home.values()}
        for b in self.plan.buffers:
            if outputs.isdisjoint(b.tensors):
                byte_spec = Spec((b.nbytes,), u8)
                array = backends[b.space].view(self.arenas[b.place], b.offset, byte_spec, (1,))
                freed.setdefault(b.end - 1, []).append((backends[b.space], array))
        return freed

    # ---- checks

    def _check_finite(self, bound: BoundStep, saved_inputs: list[Any]) -> None:
        step = bound.step
        for t, array in zip(step.results, bound.results, strict=True):
            has_floats = array is not None and step.op is not BEGIN_COPY and _is_float(t)
            if not has_floats or step.backend.all_finite(array):
                continue
            array = step.backend.read(array)
            bad_index = np.argwhere(~np.isfinite(array))[0].tolist()
            lines = [
                f"{step.op.name}: {self.names[t]} is {array[tuple(bad_index)]} at {bad_index}",
                f"  at {step.call.location} ({step.call.phase})",
            ]
            pairs = zip(step.inputs, saved_inputs, strict=True)
            lines += [f"    {self._value_range_text(x, a)}" for x, a in pairs if x is not None]
            raise FloatingPointError("\n".join(lines))

    def _value_range_text(self, t: Tensor, array: np.ndarray) -> str:
        text = f"{self.names.get(t) or self.names[t.base]}: {t.spec}"
        has_range = array.size and not array.dtype.names
        return f"{text} from {array.min():.6g} to {array.max():.6g}" if has_range else text

    def _compare_with_specification(self, bound: BoundStep, saved_inputs: list[Any]) -> None:
        """Raise AssertionError if a result differs from the f64 specification by more than f32 rounding explains."""
        step = bound.step
        if step.op is not step.call.op:
            return
        exact_results = self._specified(bound, saved_inputs, np.float64)
        f32_results = self._specified(bound, saved_inputs, np.float32)
        columns = step.results, exact_results, f32_results, bound.results
        for t, expected, f32_value, array in zip(*columns, strict=True):
            if expected is None or not _is_float(t):
                continue
            actual = step.backend.read(array)
            largest_value = float(np.abs(expected[np.isfinite(expected)]).max(initial=0.0))
            f32_rounding = float(np.nanmax(np.abs(f32_value - expected), initial=0.0))
            max_error = TOLERANCE * largest_value + 10 * f32_rounding + 1e-30
            if not np.allclose(actual, expected, rtol=0, atol=max_error, equal_nan=True):
                largest_error = float(np.nanmax(np.abs(actual - expected)))
                raise AssertionError(
                    f"{step.op.name}: {self.names[t]} differs from the specification by {largest_error:.3g} "
                    f"(largest value {largest_value:.3g})\n  at {step.call.location}"
                )

    def _specified(self, bound: BoundStep, saved_inputs: list[Any], real: type) -> tuple[Any, ...]:
        """Return the results of the op's numpy kernel (its specification) for these inputs, in type `real` for f32."""

        def widened(dtype: np.dtype) -> Any:
            return real if dtype == np.float32 else dtype

        step = bound.step
        inputs = [None if x is None else np.array(x, widened(x.dtype)) for x in saved_inputs]
        written_inputs = [inputs[i] for i in step.op.writes]
        fresh_results = [
            None if a is None else np.zeros(t.dtype.array_shape(t.shape), widened(t.dtype.numpy))
            for t, a in zip(step.results, bound.results, strict=True)
        ]
        results = (*written_inputs, *fresh_results[len(written_inputs) :])
        kernel_out = results if step.call.returns_tuple else results[0]
        step.op.kernels["numpy"].run(kernel_out, *inputs, **step.call.attrs)
        return results


def _is_float(t: Tensor) -> bool:
    return bool(t.dtype.numpy.kind == "f")
