"""Spec, Op and Tensor, the nouns of every graph. Read this file first.

Calling an Op runs its shape rule and returns Tensors that reference the Call. No memory, backends or runs here.
"""

import inspect
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

import numpy as np

from packtrain.dtypes import Dtype, f32
from packtrain.engine.call_site import CallAuthor, Phase, caller_line, current_author

P = ParamSpec("P")
R = TypeVar("R")
Rule = TypeVar("Rule", bound=Callable[..., Any])
Shape = tuple[int, ...]
Indices = tuple[int, ...]
Kind = Literal["weight", "state", "input", "constant"]
Role = Literal["weight", "table", "moment", "sum", "cache"]  # of a weight or state


class GraphError(ValueError):
    """Raised for an invalid graph; the message names op, fact, requirement, call site and inputs."""


class RequirementError(Exception):
    """Raised by a shape rule for a violated requirement; the Op raises a GraphError with its name and the call site."""


def require(condition: bool, fact: str, *tensors: "Tensor | None") -> None:
    """Raise RequirementError unless the condition holds; each `{}` in the fact stands for the spec of a tensor."""
    if not condition:
        raise RequirementError(fact.format(*[t and t.spec for t in tensors]) if tensors else fact)


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor's logical shape in NumPy order, and its element type."""

    shape: Shape
    dtype: Dtype = f32

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return spec_nbytes(self.shape, self.dtype)

    @property
    def strides(self) -> Shape:
        """Bytes from one element to the next along each axis, if the tensor is dense."""
        return dense_strides(self.shape, self.dtype)

    def require(self, **tensors: "Tensor | None") -> "Spec":
        """Return this spec; raise RequirementError unless all the tensors have it or are None; for shape rules."""
        for name, t in tensors.items():
            if t is not None and t.spec != self:
                raise RequirementError(f"{name} is {t.spec}; it must be {self}")
        return self

    def __str__(self) -> str:
        return f"{self.dtype.name}{[*self.shape]}"


# cached: thousands of tensors share a few dozen shapes
@cache
def spec_nbytes(shape: Shape, dtype: Dtype) -> int:
    return math.prod(shape[:-1]) * dtype.row_nbytes(shape[-1] if shape else 1)


@cache
def dense_strides(shape: Shape, dtype: Dtype) -> Shape:
    row_sizes = *map(dtype.row_nbytes, shape[-1:]), *shape[-2:0:-1]
    strides = dtype.block_nbytes, *itertools.accumulate(row_sizes, operator.mul)
    return strides[: len(shape)][::-1]


@dataclass(frozen=True, slots=True)
class View(Spec):
    """Result of a view op's shape rule: strides (`layout`) and `offset` in the input's storage, in bytes."""

    layout: Shape = ()
    offset: int = 0


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Call:
    """One application of an Op: `results = op(*inputs, **attrs)`, at source line `origin`; `reads` omits None."""

    op: "Op[..., Any]"
    inputs: tuple["Tensor | None", ...]
    reads: tuple["Tensor", ...]
    attrs: dict[str, Any]
    serial: int
    origin: tuple[str, int]
    phase: Phase
    results: tuple["Tensor", ...] = ()
    returns_tuple: bool = False  # of several results, or of updated leaves; for kernels and vjps

    @property
    def location(self) -> str:
        return f"{self.origin[0].rpartition('/')[2]}:{self.origin[1]}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Tensor:
    """A symbolic value: immutable, compared by identity, named at most once (see `named`). A leaf has a `kind`, and a
    `role` if its value outlives a run; any other tensor is result `index` of its `call`. A view, and the new handle
    that a writing op returns, share the bytes of `base`."""

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
        """The tensor that owns the bytes: this one, or the one that it views."""
        return self.shared or self

    @property
    def dense(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        shape, dense = self.spec.shape, dense_strides(self.spec.shape, self.spec.dtype)
        if self.shared is None or self.strides == dense or math.prod(shape) <= 1:
            return True
        axes = zip(shape, self.strides, dense, strict=True)
        return not [n for n, stride, dense_stride in axes if n != 1 and stride != dense_stride]

    @property
    def handle(self) -> "Tensor":
        """The tensor that this one views: a leaf, a result, or what an op that wrote a leaf returned; else itself."""
        t = self
        while t.call is not None and t.call.op.view:
            t = t.call.reads[0]
        return t

    @property
    def label(self) -> str:
        return self.name or (f"a result of {self.call.op.name}" if self.call else "a leaf")

    def line(self, names: Mapping["Tensor", str]) -> str:
        """Return the tensor as text: `name: spec = op(inputs, attrs)`, or `name: spec` for a leaf."""
        call, spec, arguments = self.call, self.spec, list[str]()
        typed_name = f"{names.get(self) or self.label}: {spec.dtype.name}{[*spec.shape]}"
        if call is None:
            return typed_name
        inputs = list(call.inputs)
        while inputs and inputs[-1] is None:
            inputs.pop()
        for x in inputs:
            arguments.append("None" if x is None else names.get(x) or x.label)
        for key, value in call.attrs.items():
            arguments.append(f"{key}={value!r}")
        return f"{typed_name} = {call.op.name}({', '.join(arguments)})"

    def __str__(self) -> str:
        return self.line({}) + (f"  # {self.call.location}" if self.call else "")

    def __repr__(self) -> str:
        return f"<{self.label}: {self.spec}>"


def named(name: str, tensor: Tensor) -> Tensor:
    """Give a tensor without a name this name and return it; raise GraphError if it has a name."""
    if tensor.name is not None:
        raise GraphError(f"{tensor.name} already has a name and cannot become {name}")
    object.__setattr__(tensor, "name", name)
    return tensor


# ---- leaves --------------------------------------------------------------------------------------------------


def weight(name: str, shape: Shape, dtype: Dtype = f32, role: Role = "weight") -> Tensor:
    """Make a leaf for a weight, which is trained or frozen, and saved; a `table` is never trained."""
    return _make_leaf(name, shape, dtype, "weight", role)


def state(name: str, shape: Shape, dtype: Dtype = f32, role: Role | None = "moment") -> Tensor:
    """Make a leaf of zeros that a run may update for the next run; a `sum` or `cache` is zero in each new process."""
    return _make_leaf(name, shape, dtype, "state", role)


def input(name: str, shape: Shape, dtype: Dtype = f32) -> Tensor:
    """Make a leaf whose value is passed to every run."""
    return _make_leaf(name, shape, dtype, "input")


def constant(name: str, value: np.ndarray, dtype: Dtype = f32) -> Tensor:
    """Make a leaf whose value is part of the graph; for a block type, an array of blocks."""
    exact = np.array(value, dtype.numpy)
    if exact.dtype.kind in "iu" and not np.array_equal(exact, value):
        raise GraphError(f"{name}: its values are not all {dtype}")
    exact.flags.writeable = False
    return _make_leaf(name, dtype.tensor_shape(exact.shape), dtype, "constant", value=exact)


def _make_leaf(
    name: str, shape: Shape, dtype: Dtype, kind: Kind, role: Role | None = None, value: Any = None
) -> Tensor:
    shape = tuple(map(int, shape))
    if min(shape, default=0) < 0 or (shape[-1] if shape else 1) % dtype.block:
        fact = f"shape {shape} is not possible; {dtype} rows are blocks of {dtype.block}"
        raise GraphError(f"{name}: {fact}")
    strides = dense_strides(shape, dtype)
    return Tensor(Spec(shape, dtype), strides, kind=kind, role=role, value=value, name=name)


# ---- ops -----------------------------------------------------------------------------------------------------

_call_serials = itertools.count()
OPS: dict[str, "Op[..., Any]"] = {}
IsStrided = Callable[[int, Tensor], bool]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A backend's function `run(out, *inputs, **attrs)`, which may return a quicker call for later runs."""

    run: Callable[..., Callable[[], None] | None]
    strided: bool | IsStrided

    def accepts(self, index: int, t: Tensor) -> bool:
        """Whether the kernel can read t, by its strides, as its input `index`; if not, `place` inserts a dense copy."""
        strided = self.strided
        return t.dense or (strided if isinstance(strided, bool) else strided(index, t))


class Op(Generic[P, R]):
    """A named operation and every rule about it. Calling it on Tensors returns its result Tensors.

    inplace     result -> inputs whose bytes it may overwrite after their last use (a tuple is for result 0)
    view        the result shares input 0's bytes, as the rule's View says
    writes      inputs (leaves) that are updated; result i is the new handle of the i-th of them
    acc         an optional input that is added to result 0
    optional    results that a kernel can skip: it gets None for a result that nothing reads
    repeatable  its writes can be repeated, as rows of a KV cache; other incomplete writes leave the session dirty
    """

    def __init__(self, rule: Callable[..., Any], declaration: "OpDeclaration") -> None:
        self.name = self.__name__ = self.__qualname__ = rule.__name__
        self.rule, self.__doc__, self.__module__ = rule, rule.__doc__, rule.__module__
        self.__signature__ = inspect.signature(rule)  # what help() and editors show
        self.view, self.writes, self.acc = declaration.view, declaration.writes, declaration.acc
        self.optional, self.repeatable = declaration.optional, declaration.repeatable
        self.takes_active, inplace = declaration.takes_active, declaration.inplace
        self.inplace: dict[int, Indices] = inplace if isinstance(inplace, dict) else {0: inplace}
        parameters = self.__signature__.parameters.values()
        positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        self.arity, self.required = len(positional), len(positional) - len(rule.__defaults__ or ())
        attrs = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        self.defaults = {p.name: p.default for p in attrs if p.default is not p.empty}
        self.vjp_rule: Callable[..., Any] | None = None
        self.kernels: dict[str, Kernel] = {}
        self.workspaces: dict[str, Callable[..., Any]] = {}
        self.cost_rule: Callable[..., Any] | None = None
        self.sample_rule: Callable[[], Iterator[Tensor]] | None = None
        if OPS.setdefault(self.name, self) is not self:
            raise GraphError(f"two ops are called {self.name}")

    def vjp(self, rule: Rule) -> Rule:
        """Declare the rule `(dy, y, *inputs, **attrs) -> a gradient or None per input`; tuples for several results."""
        self.vjp_rule = rule
        return rule

    def kernel(self, backend: str, *, strided: bool | IsStrided = False) -> Callable[[Rule], Rule]:
        """Declare a backend's kernel. The `numpy` kernel is the specification and always takes strides; others take
        inputs that are not dense if `strided` is true, or returns true for (index of the input, tensor)."""

        def declare(run: Rule) -> Rule:
            self.kernels[backend] = Kernel(run, backend == "numpy" or strided)
            return run

        return declare

    def workspace(self, backend: str) -> Callable[[Rule], Rule]:
        """Declare `(*inputs, **attrs) -> tuple of Spec`: scratch arrays that the kernel gets as `work`."""

        def declare(rule: Rule) -> Rule:
            self.workspaces[backend] = rule
            return rule

        return declare

    def cost(self, rule: Rule) -> Rule:
        """Declare `(out, *inputs, **attrs) -> Cost`: the work of a call; by default, a call only moves its bytes."""
        self.cost_rule = rule
        return rule

    def samples(self, rule: Rule) -> Rule:
        """Declare a generator of small result tensors, whose calls tests and benchmarks run."""
        self.sample_rule = rule
        return rule

    def __call__(self, *args: P.args, **kw: P.kwargs) -> R:
        inputs: tuple[Any, ...] = args + (None,) * (self.arity - len(args))
        attrs = self.defaults | kw
        if list in map(type, kw.values()):
            attrs |= {name: tuple(v) for name, v in kw.items() if isinstance(v, list)}
        author = current_author.get() or CallAuthor(caller_line(), "forward")
        try:
            for i, t in enumerate(inputs):
                if not (isinstance(t, Tensor) or (t is None and i >= self.required)):
                    fact = f"input {i} is {t!r}; only tensors are inputs: {self.usage}"
                    raise RequirementError(fact)
            ruled = self.rule(*inputs, **attrs)
        except RequirementError as error:
            raise GraphError(refusal(self.name, str(error), inputs, author.origin)) from None
        except TypeError as error:
            if error.__traceback__ and error.__traceback__.tb_next:  # raised inside the rule
                raise
            fact = f"{str(error).removeprefix(self.name + '() ')}; call {self.usage}"
            raise TypeError(refusal(self.name, fact, inputs, author.origin)) from None
        reads = tuple([t for t in inputs if t is not None]) if None in inputs else inputs
        call = Call(self, inputs, reads, attrs, next(_call_serials), author.origin, author.phase)
        specs = ruled if isinstance(ruled, tuple) else (ruled,)
        results = tuple(map(self._make_result, itertools.repeat(call), itertools.count(), specs))
        object.__setattr__(call, "results", results)
        object.__setattr__(call, "returns_tuple", len(results) > 1 or bool(self.writes))
        return results if isinstance(ruled, tuple) else results[0]  # type: ignore[return-value]

    def _make_result(self, call: Call, index: int, spec: Spec) -> Tensor:
        if isinstance(spec, View):
            x, dense = call.reads[0], Spec(spec.shape, spec.dtype)
            return Tensor(dense, spec.layout, x.offset + spec.offset, call, shared=x.shared or x)
        if index < len(self.writes):
            leaf = call.inputs[self.writes[index]]
            assert leaf is not None
            base = leaf.shared or leaf
            is_shared = [t.shared or t for t in call.reads].count(base) > 1
            if base.kind not in ("weight", "state") or leaf.handle is not leaf or is_shared:
                requirement = f"{leaf.label} is written, so it must be a whole weight or state leaf, and read once"
                raise GraphError(refusal(self.name, requirement, call.inputs, call.origin))
            return Tensor(spec, dense_strides(spec.shape, spec.dtype), 0, call, index, shared=base)
        return Tensor(spec, dense_strides(spec.shape, spec.dtype), 0, call, index)

    @property
    def usage(self) -> str:
        """How to call the op, such as `rms_norm(x, *, eps)`: inputs, then keywords with their defaults."""
        parameters = [p.replace(annotation=p.empty) for p in self.__signature__.parameters.values()]
        return f"{self.name}{inspect.Signature(parameters)}"

    def __repr__(self) -> str:
        return f"<op {self.usage}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpDeclaration:
    """The arguments of `@op(...)`; calling the declaration on a shape rule returns an Op with its signature."""

    inplace: Indices | dict[int, Indices] = ()
    view: bool = False
    writes: Indices = ()
    acc: int | None = None
    optional: Indices = ()
    repeatable: bool = False
    takes_active: bool = False  # its vjp takes `active`: whether each input needs a gradient

    @overload
    def __call__(self, rule: Callable[P, Spec]) -> Op[P, Tensor]: ...
    @overload
    def __call__(self, rule: Callable[P, tuple[Spec, ...]]) -> Op[P, tuple[Tensor, ...]]: ...
    def __call__(self, rule: Callable[P, Any]) -> Op[P, Any]:
        return Op(rule, self)


op = OpDeclaration


def refusal(name: str, fact: str, inputs: Iterable[Any], at: tuple[str, int] | None = None) -> str:
    """Return the text of a GraphError: op `name`, fact, call site `at` (file, line; None: the caller's) and inputs."""
    file, line = at or caller_line()
    tensors = dict.fromkeys(t for t in inputs if isinstance(t, Tensor))
    lines = [f"{name}: {fact}", f"  at {file.rpartition('/')[2]}:{line}"]
    return "\n".join(lines + [f"    {t}" for t in tensors])
