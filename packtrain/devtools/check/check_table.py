"""Tables of check results by op, type and backend: as text and as JSON."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from packtrain.common.text import plural
from packtrain.devtools.check import check_cases

CHECKS = (check_cases.VALUE, check_cases.SLOPE, check_cases.PEER)


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
    return [CheckRow(*key, len(group), worst_errors(group)) for key, group in groups.items()]


def worst_errors(results: Sequence[check_cases.CheckResult]) -> dict[str, float]:
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


def has_peer(results: Iterable[check_cases.CheckResult]) -> bool:
    """Whether one of the results is a comparison with PyTorch, which benchmarks.check makes."""
    return any(result.check == check_cases.PEER for result in results)
