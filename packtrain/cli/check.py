"""packtrain check: check every op: values of each backend, gradients against slopes; benchmarks.check adds PyTorch."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packtrain.cli import DONE, FAILED, print_message
from packtrain.common.errors import InputError
from packtrain.common.files import check_writable, write_text
from packtrain.common.option_rules import check_rules
from packtrain.common.options import option, positional
from packtrain.common.text import did_you_mean
from packtrain.devtools.check.check_cases import NO_KERNEL, CheckResult, check_op, checkable_names
from packtrain.devtools.check.check_table import table_lines, to_json
from packtrain.engine.backends import DEVICES, target
from packtrain.training.monitoring.work_progress import WorkCounter


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
    """Check ops, print a table, and say what is beyond tolerance. Raises InputError, OSError."""
    return report(settings, *run_checks(settings, check_op))


def run_checks(
    settings: CheckSettings, check: Callable[..., Iterator[CheckResult]]
) -> tuple[list[CheckResult], float]:
    """Run `check`, which is called as check_op is, for the requested ops; returns its results and the seconds."""
    op_names = _selected_ops(settings)
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


def _selected_ops(settings: CheckSettings) -> list[str]:
    op_names = checkable_names()
    for name in settings.ops:
        if name not in op_names:
            suggestion = did_you_mean(name, op_names) or f"; there are {', '.join(op_names)}"
            raise InputError(f"OPS: there is no op {name}{suggestion}")
    check_rules(settings)
    check_writable(settings.json, "--json")
    return list(dict.fromkeys(settings.ops)) or op_names
