"""Figures of checks by op, type and backend: as text, as JSON, and with what the registry says as Markdown."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from packtrain.common.text import plural
from packtrain.devtools.check.check_cases import (
    PEER,
    SLOPE,
    VALUE,
    Found,
    has_torch,
    peers,
    trained,
)
from packtrain.devtools.check.function_checks import FUNCTIONS
from packtrain.devtools.check.op_samples import typed
from packtrain.dtypes import READABLE, f32
from packtrain.engine.tensor import OPS

CHECKS = (VALUE, SLOPE, PEER)
GGML = re.compile(r"\bggml_\w+")
CITED = re.compile(r"(\bggml_\w+(, | and | to )?)+[.;,]?")
PAGE = """# Ops

Written by `packtrain check --markdown docs/ops.md`, which checks them all: values on each backend against the
specification in float64, gradients against central differences in float64, and both against PyTorch in float64. Errors
are of the largest value, rounded up to a power of ten, as they were on the machine that wrote this. A function is
composed of ops, and its gradient follows from theirs. Shapes broadcast as in NumPy.

| op | what it is | in ggml | beside f32 | kernels | gradient | worst value | worst gradient | PyTorch |
|---|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Row:
    """Checks of one op in one type on one backend: how many, and the worst error of each kind."""

    op: str
    dtype: str
    backend: str
    cases: int
    worst: dict[str, float]


def rows(results: Iterable[Found]) -> list[Row]:
    """By op, type and backend, in the order in which they were found."""
    groups: dict[tuple[str, str, str], list[Found]] = {}
    for result in results:
        groups.setdefault((result.op, result.dtype, result.backend), []).append(result)
    return [
        Row(*key, len(group), {c: worst for c in CHECKS if (worst := _worst(group, c)) is not None})
        for key, group in groups.items()
    ]


def _worst(results: Iterable[Found], check: str) -> float | None:
    return max((result.error for result in results if result.check == check), default=None)


def lines(results: Sequence[Found], seconds: float) -> Iterator[str]:
    """The table as text, and below it how much was checked."""
    yield f"{'op':20} {'type':8} {'on':8} {'cases':>5}" + "".join(f"{c:>10}" for c in CHECKS)
    for row in rows(results):
        errors = (f"{row.worst[c]:.1e}" if c in row.worst else "" for c in CHECKS)
        yield f"{row.op:20} {row.dtype:8} {row.backend:8} {row.cases:5}" + "".join(
            f"{error:>10}" for error in errors
        )
    names = dict.fromkeys(result.op for result in results)
    yield (
        f"{plural(len(results), 'case')} of {plural(len(names), 'op or function', 'ops and functions')} in"
        f" {seconds:.0f} s; errors are of the largest value, or of 1 where all are smaller"
    )
    if not has_torch():
        yield "nothing was compared with PyTorch: that takes PyTorch and a checkout of the repository"
    elif names_without_peer := [name for name in names if name not in peers()]:
        yield f"no peer in PyTorch: {', '.join(names_without_peer)}"


def plain(results: Sequence[Found], seconds: float) -> dict[str, Any]:
    """What --json writes."""
    return {
        "cases": len(results),
        "seconds": round(seconds, 1),
        "pytorch": has_torch(),
        "rows": [asdict(row) for row in rows(results)],
        "failed": [str(result) for result in results if not result.passed],
    }


# ---- the page of all ops -------------------------------------------------------------------------------------


def page(results: Sequence[Found]) -> str:
    """docs/ops.md."""
    by_op: dict[str, list[Found]] = {}
    for result in results:
        by_op.setdefault(result.op, []).append(result)
    return PAGE + "".join(
        f"| {' | '.join([*about(name), *_errors(by_op[name])])} | {peer(name)} |\n"
        for name in sorted(by_op)
    )


def about(name: str) -> list[str]:
    """What the registry says of an op, by columns of the page."""
    text = (OPS[name].__doc__ if name in OPS else FUNCTIONS[name].make.__doc__) or ""
    first = CITED.sub("", text.partition("\n")[0]).strip().rstrip("., ;") + "."
    kernels = ", ".join(sorted(OPS[name].kernels)) if name in OPS else "of its ops"
    return [
        f"`{name}`" if name in OPS else f"`{name}` (function)",
        first.replace("|", "\\|"),
        ", ".join(dict.fromkeys(GGML.findall(text))),
        "; ".join(_types(name)),
        kernels or "none: a view",
        "yes" if trained(name) else "no",
    ]


def _types(name: str) -> Iterator[str]:
    """What other types an input takes."""
    types_by_leaf: dict[str, list[str]] = {}
    for variant in typed(name) if name in OPS else ():
        types_by_leaf.setdefault(variant.packed, []).append(str(variant.dtype))
    all_types = [str(t) for t in READABLE if t != f32]
    for leaf, types in types_by_leaf.items():
        yield f"{leaf}: {'every type' if types == all_types else ', '.join(types)}"


def peer(name: str) -> str:
    return "yes" if has_torch() and name in peers() else "no"


def _errors(results: Sequence[Found]) -> list[str]:
    values = _worst(results, VALUE)
    slopes = [e for c in (SLOPE, PEER) if (e := _worst(results, c)) is not None]
    return ["" if e is None else _power(e) for e in (values, max(slopes, default=None))]


def _power(error: float) -> str:
    """The next power of ten."""
    return "0" if error == 0 else f"1e{int(f'{error:.0e}'.partition('e')[2]) + 1}"
