"""One kernel run of a placed graph. A copy between memories is one step, or two: begin and finish."""

from copy import copy
from dataclasses import dataclass, field
from typing import Any

from packtrain.engine.backends import Backend, OpCall
from packtrain.engine.ops.shape import cont
from packtrain.engine.tensor import Call, Kernel, Op, Spec, Tensor


def _copy_op(name: str, *inplace: int) -> Op[..., Any]:
    """Make an op of one step of a copy: it occurs in placed graphs only, and has the shape rule of `cont`."""
    op = copy(cont)
    op.name, op.inplace = name, {0: inplace}
    return op


BEGIN_COPY = _copy_op("begin")  # a copy that runs beside other steps
FINISH_COPY = _copy_op("arrived", 0)  # (copy under way, its source) -> the finished copy


@dataclass(frozen=True, slots=True, eq=False)
class KernelStep:
    """One kernel run: `kernel(results, *inputs, **attrs)` on `backend`, for `call` of the graph.

    source      the backend that a copy between memories reads from, else None
    reads       the inputs that are not None
    attrs       attributes for the kernel; empty for an inserted copy
    workspaces  scratch arrays that the kernel needs while it runs
    """

    op: Op[..., Any]
    call: Call
    backend: Backend
    kernel: Kernel
    inputs: tuple[Tensor | None, ...]
    results: tuple[Tensor, ...]
    source: Backend | None = None
    reads: tuple[Tensor, ...] = field(init=False)
    attrs: dict[str, Any] = field(init=False)
    workspaces: tuple[Spec, ...] = field(init=False)

    def __post_init__(self) -> None:
        call, op, inputs = self.call, self.op, self.inputs
        attrs = call.attrs if op is call.op else {}
        reads = call.reads if inputs == call.inputs else tuple([t for t in inputs if t is not None])
        object.__setattr__(self, "reads", reads)
        object.__setattr__(self, "attrs", attrs)
        object.__setattr__(self, "workspaces", self.backend.workspaces(op, inputs, attrs))

    @property
    def is_host_copy(self) -> bool:
        """Whether this step is a copy between memories, which the host carries out in every run."""
        return self.source is not None or self.op is FINISH_COPY

    @property
    def op_call(self) -> OpCall | None:
        """Op, inputs and attributes, as backends take them; None for a copy that the host carries out."""
        return None if self.is_host_copy else (self.op, self.inputs, self.attrs)
