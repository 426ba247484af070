"""One kernel run of a placed graph. Copies from another memory are steps, too, whole or in two parts."""

from copy import copy
from dataclasses import dataclass
from typing import Any

from packtrain.engine.backends import Backend, OpCall
from packtrain.engine.ops.shape import cont
from packtrain.engine.tensor import Call, Kernel, Op, Spec, Tensor


def _copy_op(name: str, *inplace: int) -> Op[..., Any]:
    """An op of placed graphs alone, with the shape rule of a copy."""
    op = copy(cont)
    op.name, op.inplace = name, {0: inplace}
    return op


BEGIN_COPY = _copy_op("begin")  # a copy that travels while other steps run
FINISH_COPY = _copy_op("arrived", 0)  # (what travels, its source): the copy, when it is whole


@dataclass(frozen=True, slots=True, eq=False)
class KernelStep:
    """One kernel run: `kernel(results, *inputs, **attrs)` on `backend`, for `call` of the graph.

    source  of a copy from another memory, the backend there
    """

    op: Op[..., Any]
    call: Call
    backend: Backend
    kernel: Kernel
    inputs: tuple[Tensor | None, ...]
    results: tuple[Tensor, ...]
    source: Backend | None = None

    @property
    def is_host_copy(self) -> bool:
        """Whether it is for the host to carry out, each time."""
        return self.source is not None or self.op is FINISH_COPY

    @property
    def is_recompute(self) -> bool:
        return self.call.phase == "recomputed" and self.op is self.call.op

    @property
    def reads(self) -> list[Tensor]:
        return [t for t in self.inputs if t is not None]

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes for its kernel; an inserted copy has none."""
        return self.call.attrs if self.op is self.call.op else {}

    @property
    def op_call(self) -> OpCall:
        """What its kernel is for."""
        return self.op, self.inputs, self.attrs

    @property
    def workspaces(self) -> tuple[Spec, ...]:
        """Scratch that its kernel needs while it runs."""
        return self.backend.workspaces(self.op, self.inputs, self.attrs)
