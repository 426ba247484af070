"""One kernel run of a placed graph. A copy between memories is one step, or two: begin and finish."""

from copy import copy
from dataclasses import dataclass
from typing import Any

from packtrain.engine.backends import Backend, OpCall
from packtrain.engine.ops.shape import cont
from packtrain.engine.tensor import Call, Kernel, Op, Spec, Tensor


def _copy_op(name: str, *inplace: int) -> Op[..., Any]:
    """Make an op for placed graphs alone, with a copy's shape rule."""
    op = copy(cont)
    op.name, op.inplace = name, {0: inplace}
    return op


BEGIN_COPY = _copy_op("begin")  # a copy that runs beside other steps
FINISH_COPY = _copy_op("arrived", 0)  # (copy under way, its source) -> the finished copy


@dataclass(frozen=True, slots=True, eq=False)
class KernelStep:
    """One kernel run: `kernel(results, *inputs, **attrs)` on `backend`, for `call` of the graph.

    source  the backend that a copy between memories reads from, else None
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
        """Whether the host carries out this step in every run: a copy between memories."""
        return self.source is not None or self.op is FINISH_COPY

    @property
    def is_recompute(self) -> bool:
        return self.call.phase == "recomputed" and self.op is self.call.op

    @property
    def reads(self) -> list[Tensor]:
        return [t for t in self.inputs if t is not None]

    @property
    def attrs(self) -> dict[str, Any]:
        """Attributes for the kernel; empty for an inserted copy."""
        return self.call.attrs if self.op is self.call.op else {}

    @property
    def op_call(self) -> OpCall:
        """Op, inputs and attributes, as backends take them."""
        return self.op, self.inputs, self.attrs

    @property
    def workspaces(self) -> tuple[Spec, ...]:
        """Scratch arrays that the kernel needs while it runs."""
        return self.backend.workspaces(self.op, self.inputs, self.attrs)
