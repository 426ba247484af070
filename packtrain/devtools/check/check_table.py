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


def rows(found: Iterable[Found]) -> list[Row]:
    """By op, type and backend, in the order in which they were found."""
    groups: dict[tuple[str, str, str], list[Found]] = {}
    for one in found:
        groups.setdefault((one.op, one.dtype, one.backend), []).append(one)
    return [
        Row(*key, len(group), {c: worst for c in CHECKS if (worst := _worst(group, c)) is not None})
        for key, group in groups.items()
    ]


def _worst(found: Iterable[Found], check: str) -> float | None:
    return max((one.error for one in found if one.check == check), default=None)


def lines(found: Sequence[Found], seconds: float) -> Iterator[str]:
    """The table as text, and below it how much was checked."""
    yield f"{'op':20} {'type':8} {'on':8} {'cases':>5}" + "".join(f"{c:>10}" for c in CHECKS)
    for row in rows(found):
        errors = (f"{row.worst[c]:.1e}" if c in row.worst else "" for c in CHECKS)
        yield f"{row.op:20} {row.dtype:8} {row.backend:8} {row.cases:5}" + "".join(
            f"{error:>10}" for error in errors
        )
    names = dict.fromkeys(one.op for one in found)
    yield (
        f"{plural(len(found), 'case')} of {plural(len(names), 'op or function', 'ops and functions')} in"
        f" {seconds:.0f} s; errors are of the largest value, or of 1 where all are smaller"
    )
    if not has_torch():
        yield "nothing was compared with PyTorch: that takes PyTorch and a checkout of the repository"
    elif without := [name for name in names if name not in peers()]:
        yield f"no peer in PyTorch: {', '.join(without)}"


def plain(found: Sequence[Found], seconds: float) -> dict[str, Any]:
    """What --json writes."""
    return {
        "cases": len(found),
        "seconds": round(seconds, 1),
        "pytorch": has_torch(),
        "rows": [asdict(row) for row in rows(found)],
        "failed": [str(one) for one in found if not one.passed],
    }


# ---- the page of all ops -------------------------------------------------------------------------------------


def page(found: Sequence[Found]) -> str:
    """docs/ops.md."""
    by_op: dict[str, list[Found]] = {}
    for one in found:
        by_op.setdefault(one.op, []).append(one)
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
    taken: dict[str, list[str]] = {}
    for one in typed(name) if name in OPS else ():
        taken.setdefault(one.packed, []).append(str(one.dtype))
    every = [str(t) for t in READABLE if t != f32]
    for leaf, types in taken.items():
        yield f"{leaf}: {'every type' if types == every else ', '.join(types)}"


def peer(name: str) -> str:
    return "yes" if has_torch() and name in peers() else "no"


def _errors(found: Sequence[Found]) -> list[str]:
    values = _worst(found, VALUE)
    slopes = [e for c in (SLOPE, PEER) if (e := _worst(found, c)) is not None]
    return ["" if e is None else _power(e) for e in (values, max(slopes, default=None))]


def _power(error: float) -> str:
    """The next power of ten."""
    return "0" if error == 0 else f"1e{int(f'{error:.0e}'.partition('e')[2]) + 1}"
