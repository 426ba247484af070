"""packtrain check: check every op: values of each backend, gradients against slopes; benchmarks.check adds PyTorch."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packtrain.cli import DONE, FAILED, print_message
from packtrain.common.errors import InputError
from packtrain.common.files import check_writable, write_text
from packtrain.common.option_rules import check_rules
from packtrain.common.options import option, positional
from packtrain.common.text import did_you_mean, plural
from packtrain.devtools.check import check_cases
from packtrain.devtools.check.check_cases import NO_KERNEL, CheckResult, check_op, checkable_names
from packtrain.engine.backends import DEVICES, target
from packtrain.training.monitoring.progress import WorkCounter

CHECKS = (check_cases.VALUE, check_cases.SLOPE, check_cases.PEER)


@dataclass(frozen=True, slots=True)
class CheckRow:
    """Checks of one op in one type on one backend; `cases`: how many, `worst`: the largest error by kind of check."""

    op: str
    dtype: str
    backend: str
    cases: int
    worst: dict[str, float]


def group_rows(results: Iterable[check_cases.CheckResult]) -> list[CheckRow]:
    """Return a row for each op, type and backend, in the order of the results."""
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


@dataclass(frozen=True)
class CheckSettings:
    """Check values and gradients of ops."""

    ops: tuple[str, ...] = positional("names of ops to check, if not all", ())
    device: tuple[str, ...] = option(
        ("cpu", "numpy"), "backend to check; may be repeated", choices=tuple(DEVICES)
    )
    seed: int = option(0, "for the values of inputs", min_value=0)
    json: Path | None = option(None, "write the figures as JSON to this file")


def run(settings: CheckSettings) -> int:
    """Check ops, print a table and errors beyond tolerance; returns the exit code. Raises InputError, OSError."""
    return report(settings, *run_checks(settings, check_op))


def run_checks(
    settings: CheckSettings, check: Callable[..., Iterator[CheckResult]]
) -> tuple[list[CheckResult], float]:
    """Run check(op, backends, seed) for the requested ops; returns its results, and the seconds it took in all."""
    op_names = checkable_names()
    for name in settings.ops:
        if name not in op_names:
            suggestion = did_you_mean(name, op_names) or f"; there are {', '.join(op_names)}"
            raise InputError(f"OPS: there is no op {name}{suggestion}")
    check_rules(settings)
    check_writable(settings.json, "--json")
    op_names = list(dict.fromkeys(settings.ops)) or op_names  # all if none is named
    backends = [target(device).backends[0] for device in settings.device]
    start_time, op_results = time.perf_counter(), list[CheckResult]()
    with WorkCounter(sys.stderr, "checking", "op") as counter:
        for i, name in enumerate(op_names):
            counter(i + 1, len(op_names), name)
            try:
                op_results += check(name, backends, settings.seed)
            except Exception as error:  # a kernel that fails is one more thing to report
                message = f"{type(error).__name__}: {' '.join(str(error).split())}"
                op_results.append(CheckResult(name, "", "", message, "", float("inf"), 0.0))
    return op_results, time.perf_counter() - start_time


def report(settings: CheckSettings, op_results: Sequence[CheckResult], seconds: float) -> int:
    """Print and write the table, and say what is beyond tolerance; returns the exit code. Raises OSError."""
    print("\n".join(table_lines(op_results, seconds)))
    if settings.json:
        write_text(settings.json, json.dumps(to_json(op_results, seconds), indent=1) + "\n")
    failed_results = [result for result in op_results if not result.has_passed]
    for result in failed_results:
        print_message(str(result) if result.case == NO_KERNEL else f"beyond tolerance: {result}")
    return FAILED if failed_results else DONE
