"""Spec, Op, Tensor: what is computed. Read this first.

Calling an Op on Tensors runs its shape rule and returns new Tensors that reference the Call. Nothing here knows
memory, backends or values.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

import numpy as np

from packtrain.dtypes import Dtype, f32
from packtrain.engine.call_site import Phase, caller_line, current_author

P = ParamSpec("P")
R = TypeVar("R")
RuleFunction = TypeVar("RuleFunction", bound=Callable[..., Any])
Shape = tuple[int, ...]
Indices = tuple[int, ...]
Kind = Literal["weight", "state", "input", "constant"]
Role = Literal["weight", "table", "moment", "sum", "cache"]  # of a weight or state


class GraphError(ValueError):
    """An invalid graph; the message has op, fact, requirement, call site and inputs."""


class RequirementError(Exception):
    """A violated requirement of a shape rule; the Op adds its name and the call site."""


def require(condition: bool, fact: str) -> None:
    """State a requirement inside a shape rule."""
    if not condition:
        raise RequirementError(fact)


@dataclass(frozen=True, slots=True)
class Spec:
    """Logical shape in NumPy order and element type."""

    shape: Shape
    dtype: Dtype = f32

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return _spec_nbytes(self.shape, self.dtype)

    @property
    def strides(self) -> Shape:
        """Bytes between neighbours along each axis when the tensor is dense."""
        return _spec_strides(self.shape, self.dtype)

    def __str__(self) -> str:
        return _spec_text(self.shape, self.dtype)


# cached: thousands of tensors share a few dozen shapes


@cache
def _spec_nbytes(shape: Shape, dtype: Dtype) -> int:
    return math.prod(shape[:-1]) * dtype.row_nbytes(shape[-1] if shape else 1)


@cache
def _spec_strides(shape: Shape, dtype: Dtype) -> Shape:
    if not shape:
        return ()
    strides, stride = [dtype.block_nbytes], dtype.row_nbytes(shape[-1])
    for n in shape[-2::-1]:
        strides.append(stride)
        stride *= n
    return tuple(strides[::-1])


@cache
def _spec_text(shape: Shape, dtype: Dtype) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


@dataclass(frozen=True, slots=True)
class View(Spec):
    """The result of a view's shape rule: where in the input's storage the elements are, in bytes."""

    layout: Shape = ()
    offset: int = 0


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Call:
    """One application of an Op: `results = op(*inputs, **attrs)`, written at `origin`; `reads` omits None."""

    op: "Op[..., Any]"
    inputs: tuple["Tensor | None", ...]
    reads: tuple["Tensor", ...]
    attrs: dict[str, Any]
    serial: int
    origin: tuple[str, int]
    phase: Phase
    results: tuple["Tensor", ...] = ()

    @property
    def returns_tuple(self) -> bool:
        """Whether kernels and vjps get a tuple of results, as the caller did."""
        return len(self.results) > 1 or bool(self.op.writes)

    @property
    def location(self) -> str:
        return f"{self.origin[0].rpartition('/')[2]}:{self.origin[1]}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Tensor:
    """A symbolic value: immutable, compared by identity, named at most once (see `named`).

    A leaf has a `kind`, and if it outlives a run a `role`; any other tensor is result `index` of its `call`. A view,
    and the new handle that a writing op returns, share the bytes of `base`.
    """

    spec: Spec
    strides: Shape
    offset: int = 0
    call: Call | None = None
    index: int = 0
    kind: Kind | None = None
    role: Role | None = None
    value: np.ndarray | None = None
    shared: "Tensor | None" = None
    name: str | None = None

    @property
    def shape(self) -> Shape:
        return self.spec.shape

    @property
    def dtype(self) -> Dtype:
        return self.spec.dtype

    @property
    def base(self) -> "Tensor":
        return self.shared or self

    @property
    def dense(self) -> bool:
        if self.shared is None or self.spec.size <= 1:
            return True
        axis_strides = zip(self.shape, self.strides, self.spec.strides, strict=True)
        return all(n == 1 or stride == dense_stride for n, stride, dense_stride in axis_strides)

    @property
    def handle(self) -> "Tensor":
        """The leaf, result or updated leaf that this tensor is a view of (itself if it is no view)."""
        t = self
        while t.call is not None and t.call.op.view:
            t = t.call.reads[0]
        return t

    @property
    def stem(self) -> str:
        """The name, or the op's name, from which a Graph derives a unique name."""
        return self.name or (self.call.op.name if self.call else "leaf")

    @property
    def label(self) -> str:
        return self.name or (f"a result of {self.call.op.name}" if self.call else "a leaf")

    def line(self, names: Mapping["Tensor", str]) -> str:
        """`name: spec = op(inputs, attrs)`, or `name: spec` for a leaf."""
        typed_name = f"{names.get(self) or self.label}: {self.spec}"
        if self.call is None:
            return typed_name
        inputs = list(self.call.inputs)
        while inputs and inputs[-1] is None:
            inputs.pop()
        arguments = ["None" if x is None else names.get(x) or x.label for x in inputs]
        arguments += [f"{key}={value!r}" for key, value in self.call.attrs.items()]
        return f"{typed_name} = {self.call.op.name}({', '.join(arguments)})"

    def __str__(self) -> str:
        return self.line({}) + (f"  # {self.call.location}" if self.call else "")

    def __repr__(self) -> str:
        return f"<{self.label}: {self.spec}>"


def named(name: str, tensor: Tensor) -> Tensor:
    """Name a new tensor; a tensor is named only once."""
    if tensor.name is not None:
        raise GraphError(f"{tensor.name} already has a name and cannot become {name}")
    object.__setattr__(tensor, "name", name)
    return tensor


# ---- leaves --------------------------------------------------------------------------------------------------


def weight(name: str, shape: Shape, dtype: Dtype = f32, role: Role = "weight") -> Tensor:
    """A leaf that is trained or frozen, and saved; a `table` is never trained."""
    return _make_leaf(name, shape, dtype, "weight", role)


def state(name: str, shape: Shape, dtype: Dtype = f32, role: Role | None = "moment") -> Tensor:
    """A leaf that a run may update for the next run, initially zero; a `sum` of gradients and a `cache` are zero
    again in each process."""
    return _make_leaf(name, shape, dtype, "state", role)


def input(name: str, shape: Shape, dtype: Dtype = f32) -> Tensor:
    """A leaf whose value is passed to every run."""
    return _make_leaf(name, shape, dtype, "input")


def constant(name: str, value: np.ndarray, dtype: Dtype = f32) -> Tensor:
    """A leaf whose value is part of the graph; of a block type it is an array of blocks."""
    exact_values = np.array(value, dtype.numpy)
    if exact_values.dtype.kind in "iu" and not np.array_equal(exact_values, value):
        raise GraphError(f"{name}: its values are not all {dtype}")
    value = exact_values
    value.flags.writeable = False
    return _make_leaf(name, dtype.tensor_shape(value.shape), dtype, "constant", value=value)


def _make_leaf(
    name: str, shape: Shape, dtype: Dtype, kind: Kind, role: Role | None = None, value: Any = None
) -> Tensor:
    shape = tuple(int(n) for n in shape)
    if any(n < 0 for n in shape) or (shape[-1] if shape else 1) % dtype.block:
        raise GraphError(
            f"{name}: shape {shape} is not possible; {dtype} rows are blocks of {dtype.block}"
        )
    spec = Spec(shape, dtype)
    return Tensor(spec, spec.strides, kind=kind, role=role, value=value, name=name)


# ---- ops -----------------------------------------------------------------------------------------------------

_call_serials = itertools.count()
OPS: dict[str, "Op[..., Any]"] = {}


StridedRule = Callable[[int, Tensor], bool]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One backend's `(out, *inputs, **attrs)`, which may return `ops.arrays.again`, and which inputs may be strided."""

    run: Callable[..., Callable[[], None] | None]
    strided: bool | StridedRule

    def accepts(self, index: int, t: Tensor) -> bool:
        """Whether input `index` can be t as it is; else `place` inserts a dense copy."""
        return t.dense or (
            self.strided if isinstance(self.strided, bool) else self.strided(index, t)
        )


class Op(Generic[P, R]):
    """A named operation and every rule about it. Calling it on Tensors returns its result Tensors.

    inplace   result -> inputs whose bytes it may overwrite after their last use (a tuple is for result 0)
    view      the result shares input 0's bytes, as the rule's View says
    writes    inputs (leaves) that are updated; result i is the new handle of the i-th of them
    acc       an optional input that is added to result 0
    optional  results a kernel can skip: it gets None for one that is not read
    repeatable  its writes can be repeated, so a run that is stopped after it does no harm
    """

    def __init__(self, rule: Callable[..., Any], declaration: "OpDeclaration") -> None:
        self.rule, self.name, self.__doc__ = rule, rule.__name__, rule.__doc__
        self.view, self.writes, self.acc = declaration.view, declaration.writes, declaration.acc
        self.optional, self.repeatable = declaration.optional, declaration.repeatable
        inplace = declaration.inplace
        self.inplace: dict[int, Indices] = inplace if isinstance(inplace, dict) else {0: inplace}
        parameters = inspect.signature(rule).parameters.values()
        keyword_params = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        self.arity = len(parameters) - len(keyword_params)
        self.required = sum(p.default is p.empty and p not in keyword_params for p in parameters)
        self.defaults = {p.name: p.default for p in keyword_params if p.default is not p.empty}
        self.vjp_rule: Callable[..., Any] | None = None
        self.kernels: dict[str, Kernel] = {}
        self.workspaces: dict[str, Callable[..., Any]] = {}
        self.cost_rule: Callable[..., Any] | None = None
        self.sample_rule: Callable[[], Iterator[Tensor]] | None = None
        if OPS.setdefault(self.name, self) is not self:
            raise GraphError(f"two ops are called {self.name}")

    def vjp(self, rule: RuleFunction) -> RuleFunction:
        """Declare `(dy, y, *inputs, **attrs) -> a gradient or None per input`; tuples for several results."""
        self.vjp_rule = rule
        return rule

    def kernel(
        self, backend: str, *, strided: bool | StridedRule = False
    ) -> Callable[[RuleFunction], RuleFunction]:
        """Declare a backend's kernel. The `numpy` one is the specification and always takes strides."""

        def declare(run: RuleFunction) -> RuleFunction:
            self.kernels[backend] = Kernel(run, backend == "numpy" or strided)
            return run

        return declare

    def workspace(self, backend: str) -> Callable[[RuleFunction], RuleFunction]:
        """Declare `(*inputs, **attrs) -> tuple of Spec`: what the kernel gets as `work` while it runs."""

        def declare(rule: RuleFunction) -> RuleFunction:
            self.workspaces[backend] = rule
            return rule

        return declare

    def cost(self, rule: RuleFunction) -> RuleFunction:
        """Declare `(out, *inputs, **attrs) -> Cost`: the work of a call; without it, a call only moves its bytes."""
        self.cost_rule = rule
        return rule

    def samples(self, rule: RuleFunction) -> RuleFunction:
        """Declare a generator of small result tensors from which tests and benchmarks draw."""
        self.sample_rule = rule
        return rule

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        inputs: tuple[Any, ...] = args + (None,) * (self.arity - len(args))
        keyword_attrs = {k: tuple(v) if isinstance(v, list) else v for k, v in kwargs.items()}
        attrs: dict[str, Any] = {**self.defaults, **keyword_attrs}
        call_author = current_author.get()
        origin = call_author.origin if call_author else caller_line()
        try:
            for i, t in enumerate(inputs):
                if not (isinstance(t, Tensor) or (t is None and i >= self.required)):
                    raise RequirementError(f"input {i} is {t!r}; only tensors are inputs")
            ruled = self.rule(*inputs, **attrs)
        except RequirementError as error:
            raise GraphError(refusal(self.name, str(error), inputs, origin)) from None
        specs = ruled if isinstance(ruled, tuple) else (ruled,)
        reads = tuple(t for t in inputs if t is not None)
        phase = call_author.phase if call_author else "forward"
        call = Call(self, inputs, reads, attrs, next(_call_serials), origin, phase)
        results = tuple(self._result(call, i, spec) for i, spec in enumerate(specs))
        object.__setattr__(call, "results", results)
        return results if isinstance(ruled, tuple) else results[0]  # type: ignore[return-value]

    def _result(self, call: Call, index: int, spec: Spec) -> Tensor:
        if isinstance(spec, View):
            x = call.reads[0]
            dense_spec = Spec(spec.shape, spec.dtype)
            return Tensor(dense_spec, spec.layout, x.offset + spec.offset, call, shared=x.base)
        if index < len(self.writes):
            leaf = call.inputs[self.writes[index]]
            assert leaf is not None
            shared = sum(t.base is leaf.base for t in call.reads) > 1
            if leaf.base.kind not in ("weight", "state") or leaf.handle is not leaf or shared:
                requirement = f"{leaf.label} is written, so it must be a whole weight or state leaf, and read once"
                raise GraphError(refusal(self.name, requirement, call.inputs, call.origin))
            return Tensor(spec, spec.strides, call=call, index=index, shared=leaf.base)
        return Tensor(spec, spec.strides, call=call, index=index)

    def __repr__(self) -> str:
        return f"<op {self.name}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpDeclaration:
    """The arguments of `@op(...)`; called on a shape rule, returns an Op with the same signature."""

    inplace: Indices | dict[int, Indices] = ()
    view: bool = False
    writes: Indices = ()
    acc: int | None = None
    optional: Indices = ()
    repeatable: bool = False

    @overload
    def __call__(self, rule: Callable[P, Spec]) -> Op[P, Tensor]: ...
    @overload
    def __call__(self, rule: Callable[P, tuple[Spec, ...]]) -> Op[P, tuple[Tensor, ...]]: ...
    def __call__(self, rule: Callable[P, Any]) -> Op[P, Any]:
        return Op(rule, self)


op = OpDeclaration


def refusal(name: str, fact: str, inputs: Iterable[Any], at: tuple[str, int] | None = None) -> str:
    """What the error says: op, fact, call site and inputs."""
    file, line = at or caller_line()
    tensors = dict.fromkeys(t for t in inputs if isinstance(t, Tensor))
    lines = [f"{name}: {fact}", f"  at {file.rpartition('/')[2]}:{line}"]
    return "\n".join(lines + [f"    {t}" for t in tensors])
