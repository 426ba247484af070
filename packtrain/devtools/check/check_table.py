"""Tables of check results by op, type and backend: as text, as JSON, and as Markdown with facts of the registry."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from packtrain.common.text import plural
from packtrain.devtools.check import check_cases
from packtrain.devtools.check.function_checks import FUNCTIONS
from packtrain.devtools.check.op_samples import typed_samples
from packtrain.dtypes import READABLE, f32
from packtrain.engine.tensor import OPS

CHECKS = (check_cases.VALUE, check_cases.SLOPE, check_cases.PEER)
GGML = re.compile(r"\bggml_\w+")
CITATION = re.compile(r"(\bggml_\w+(, | and | to )?)+[.;,]?")
PAGE = """# Ops

Written by `python -m benchmarks.check --markdown docs/ops.md`, which checks them all: values on each backend
against the specification in float64, gradients against central differences in float64, and both against PyTorch in
float64. Errors are of the largest value, rounded up to a power of ten, as they were on the machine that wrote this.
A function is composed of ops, and its gradient follows from theirs. Shapes broadcast as in NumPy.

| op | what it is | in ggml | beside f32 | kernels | gradient | worst value | worst gradient | PyTorch |
|---|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class CheckRow:
    """Checks of one op in one type on one backend: number of cases, and the worst error by kind of check."""

    op: str
    dtype: str
    backend: str
    cases: int
    worst: dict[str, float]


def group_rows(results: Iterable[check_cases.CheckResult]) -> list[CheckRow]:
    """Group results by op, type and backend, in the order of the results."""
    groups: dict[tuple[str, str, str], list[check_cases.CheckResult]] = {}
    for result in results:
        groups.setdefault((result.op, result.dtype, result.backend), []).append(result)
    return [CheckRow(*key, len(group), _worst_errors(group)) for key, group in groups.items()]


def _worst_errors(results: Sequence[check_cases.CheckResult]) -> dict[str, float]:
    """Return the largest error of each kind of check that was made."""
    return {c: max(r.error for r in results if r.check == c) for c in {r.check for r in results}}


def table_lines(results: Sequence[check_cases.CheckResult], seconds: float) -> Iterator[str]:
    """Yield the lines of the table as text, and below it how much was checked."""
    checks = CHECKS if has_peer(results) else CHECKS[:2]
    yield f"{'op':20} {'type':8} {'on':8} {'cases':>5}" + "".join(f"{c:>10}" for c in checks)
    for row in group_rows(results):
        errors = (f"{row.worst[c]:.1e}" if c in row.worst else "" for c in checks)
        yield f"{row.op:20} {row.dtype:8} {row.backend:8} {row.cases:5}" + "".join(
            f"{error:>10}" for error in errors
        )
    names = dict.fromkeys(result.op for result in results)
    yield (
        f"{plural(len(results), 'case')} of {plural(len(names), 'op or function', 'ops and functions')} in"
        f" {seconds:.0f} s; errors are of the largest value, or of 1 where all are smaller"
    )


def to_json(results: Sequence[check_cases.CheckResult], seconds: float) -> dict[str, Any]:
    """Return the plain data that --json writes."""
    return {
        "cases": len(results), "seconds": round(seconds, 1), "pytorch": has_peer(results),
        "rows": [asdict(row) for row in group_rows(results)],
        "failed": [str(result) for result in results if not result.has_passed],
    }  # fmt: skip


# ---- the page of all ops -------------------------------------------------------------------------------------


def ops_page(results: Sequence[check_cases.CheckResult]) -> str:
    """Return the text of docs/ops.md, one row per op."""
    by_op: dict[str, list[check_cases.CheckResult]] = {}
    for result in results:
        by_op.setdefault(result.op, []).append(result)
    return PAGE + "".join(
        f"| {' | '.join([*op_columns(name), *_errors(by_op[name])])} | {'yes' if has_peer(by_op[name]) else 'no'} |\n"
        for name in sorted(by_op)
    )


def op_columns(name: str) -> list[str]:
    """Return the columns of docs/ops.md that the registry knows for an op."""
    text = (OPS[name].__doc__ if name in OPS else FUNCTIONS[name].function.__doc__) or ""
    summary = CITATION.sub("", text.partition("\n")[0]).strip().rstrip("., ;") + "."
    kernels = ", ".join(sorted(OPS[name].kernels)) if name in OPS else "of its ops"
    return [
        f"`{name}`" if name in OPS else f"`{name}` (function)", summary.replace("|", "\\|"),
        ", ".join(dict.fromkeys(GGML.findall(text))), "; ".join(_packed_types(name)), kernels or "none: a view",
        "yes" if check_cases.has_gradient(name) else "no",
    ]  # fmt: skip


def _packed_types(name: str) -> Iterator[str]:
    """Yield each input's element types other than f32: `w: q8_0, q4_K`."""
    types_by_leaf: dict[str, list[str]] = {}
    for variant in typed_samples(name) if name in OPS else ():
        types_by_leaf.setdefault(variant.packed_name, []).append(str(variant.dtype))
    all_types = [str(t) for t in READABLE if t != f32]
    for leaf, types in types_by_leaf.items():
        yield f"{leaf}: {'every type' if types == all_types else ', '.join(types)}"


def has_peer(results: Iterable[check_cases.CheckResult]) -> bool:
    """Whether one of the results is a comparison with PyTorch, which benchmarks.check makes."""
    return any(result.check == check_cases.PEER for result in results)


def _errors(results: Sequence[check_cases.CheckResult]) -> list[str]:
    worst = _worst_errors(results)
    slope_errors = [worst[c] for c in (check_cases.SLOPE, check_cases.PEER) if c in worst]
    errors = worst.get(check_cases.VALUE), max(slope_errors, default=None)
    return ["" if e is None else _power(e) for e in errors]


def _power(error: float) -> str:
    """Return the next power of ten above an error: 3e-7 is 1e-6."""
    return "0" if error == 0 else f"1e{int(f'{error:.0e}'.partition('e')[2]) + 1}"
