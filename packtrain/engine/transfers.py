"""Copies values from one memory to another, once for each memory, so that calls can read them.

`place` asks for inputs in the memory where a call runs; each copy becomes a step of its own.
"""

from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

from packtrain.engine.backends import HOST, Backend, cpu
from packtrain.engine.graph import Graph, unique_name
from packtrain.engine.ops.shape import cont
from packtrain.engine.step import KernelStep
from packtrain.engine.tensor import Call, GraphError, Kernel, Op, Tensor


class TransferCopies:
    """Inserts copies between memories for calls that are being placed; adds a name and a home for each copy.

    steps  the steps placed so far, to which copies are added
    order  the graph's calls in the order of the run
    """

    def __init__(
        self, graph: Graph, order: Sequence[Call], home: dict[Tensor, Backend], names: dict[Tensor, str],
        steps: list[KernelStep],
    ) -> None:  # fmt: skip
        self.home, self.names, self.steps = home, names, steps
        self.used_names = dict.fromkeys(graph.names.values(), 1)
        self.copies: dict[tuple[Tensor, str], Tensor] = {}
        self.leaving, self.left = _offloads_after(graph.offloaded, order), dict[Tensor, Tensor]()

    def part(self, t: Tensor, space: str) -> Tensor | None:
        """Return the tensor that must be copied so that t can be read in `space`; None if this copy exists."""
        copied_part = self._copied_part(t, space)
        return None if (copied_part, space) in self.copies else copied_part

    def offload_values(self, call: Call) -> None:
        """After `call` is placed, copy to host memory the values that wait there for the backward pass from then on."""
        for t in self.leaving.get(call, ()):
            if self.home[t].space != HOST:
                self.left[t] = self._copy_to(call, t, cpu)

    def bring_input(self, call: Call, t: Tensor, backend: Backend, accepts_strided: bool) -> Tensor:
        """Return t, or a copy that `backend` can read: in its memory, and dense unless strides are accepted."""
        base = t.shared or t
        home_space = self.home[base].space
        if base in self.left and backend.space == home_space:
            t = self._returned_input(call, t)
        if home_space != backend.space:
            t = self._moved_input(call, t, backend)
        if accepts_strided or t.dense:
            return t
        dense_kernel = require_kernel(backend, call, cont, (t,))
        return self._add_copy_step(call, t, backend, dense_kernel, f"{self.names[t]} dense")

    def _copied_part(self, t: Tensor, space: str) -> Tensor:
        """Return the tensor to copy so that t can be read elsewhere: t if it is a dense part, else all that t views."""
        handle = t.handle
        is_partial = t.dense and t.spec.nbytes < handle.spec.nbytes
        return t if is_partial and (handle, space) not in self.copies else handle

    def _moved_input(self, call: Call, t: Tensor, backend: Backend) -> Tensor:
        """Return t in the memory of another backend, for `call` to read: a copy, or t's view of a copy."""
        key = t, backend.space
        if key not in self.copies:
            copied_part = self._copied_part(t, backend.space)
            copy = self._copy_to(call, copied_part, backend)
            self.copies[key] = self._view_of_copy(t, copied_part, copy, f"on {backend.space}")
        return self.copies[key]

    def _returned_input(self, call: Call, t: Tensor) -> Tensor:
        """Return an offloaded tensor, or t's view of it, copied back to its home for `call` to read."""
        key, home = (t, "back"), self.home[t.base]
        if key not in self.copies:
            offloaded = self.left[t.base]
            copy = self._copy_to(call, offloaded, home, f"{self.names[t.base]} back")
            self.copies[key] = self._view_of_copy(t, t.base, copy, "back")
        return self.copies[key]

    def _view_of_copy(self, t: Tensor, copied_part: Tensor, copy: Tensor, suffix: str) -> Tensor:
        """Return `copy` if t is `copied_part`; else make t's view of that a view of `copy`, named with `suffix`."""
        if t is copied_part:
            return copy
        assert t.call is not None
        view_call = replace(t.call, inputs=(copy,), reads=(copy,))
        view = replace(t, call=view_call, shared=copy, value=None)
        self.names[view] = unique_name(f"{self.names[t]} {suffix}", self.used_names)
        return view

    def _copy_to(self, call: Call, t: Tensor, backend: Backend, name: str | None = None) -> Tensor:
        """Add a step that copies t to the memory of `backend`, at the end of the steps so far; return the copy."""
        source, name = self.home[t.base], name or f"{self.names[t]} on {backend.space}"
        kernel = Kernel(lambda y, x: move_array(backend, y, source, x), strided=False)
        return self._add_copy_step(call, t, backend, kernel, name, source)

    def _add_copy_step(
        self, call: Call, t: Tensor, backend: Backend, kernel: Kernel, name: str, source: Backend | None = None,
    ) -> Tensor:  # fmt: skip
        if (t, backend.space) not in self.copies:
            copy = self.copies[t, backend.space] = cont(t)
            self.home[copy], self.names[copy] = backend, unique_name(name, self.used_names)
            self.steps.append(KernelStep(cont, call, backend, kernel, (t,), (copy,), source))
        return self.copies[t, backend.space]


def require_kernel(
    backend: Backend, call: Call, op: Op[..., Any], inputs: tuple[Tensor | None, ...]
) -> Kernel:
    """Return the backend's kernel for an op and its inputs; raise GraphError if there is none."""
    kernel = backend.kernel(op, inputs)
    if kernel is None:
        raise GraphError(f"{op.name} has no kernel at all on {backend.name}\n  at {call.location}")
    return kernel


def _offloads_after(offloaded: Set[Tensor], order: Sequence[Call]) -> dict[Call, list[Tensor]]:
    """Return, by call, the values to offload after it: no later forward call touches these, a backward call does."""
    last, later = dict[Tensor, Call](), set[Tensor]()
    for call in (call for call in order if offloaded and not call.op.view):
        touched_tensors = offloaded & {t.base for t in (*call.reads, *call.results)}
        if call.phase == "forward":
            last |= dict.fromkeys(touched_tensors, call)
        else:
            later |= touched_tensors
    after_call = dict[Call, list[Tensor]]()
    for t in sorted(later & last.keys(), key=lambda t: (t.call.serial if t.call else -1, t.index)):
        after_call.setdefault(last[t], []).append(t)
    return after_call


def move_array(backend: Backend, y: Any, source: Backend, x: Any) -> None:
    """Copy array x of backend `source` to array y of another backend."""
    source.sync()
    target_window = backend.window(y)
    source_window = source.window(x)
    if target_window is not None:
        source.fetch(x, target_window)
    else:
        backend.write(y, source.read(x) if source_window is None else source_window)
