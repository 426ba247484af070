"""packtrain check: check every op: values of each backend, gradients against slopes, and both against PyTorch."""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from packtrain.cli import DONE, FAILED, say
from packtrain.common.errors import InputError
from packtrain.common.files import check_writable, write_text
from packtrain.common.options import option, positional
from packtrain.common.text import did_you_mean
from packtrain.devtools.check.check_cases import NO_KERNEL, Found, check, names
from packtrain.devtools.check.check_table import lines, page, plain
from packtrain.engine.backends import DEVICES, target
from packtrain.training.monitoring.work_progress import Count


@dataclass(frozen=True)
class Check:
    """Check values and gradients of ops; PyTorch is compared with where it is installed."""

    ops: tuple[str, ...] = positional("names of ops to check, if not all", ())
    device: tuple[str, ...] = option(
        ("cpu", "numpy"), "backend to check; may be repeated", choices=tuple(DEVICES)
    )
    seed: int = option(0, "for the values of inputs", least=0)
    json: Path | None = option(None, "write the figures as JSON to this file")
    markdown: Path | None = option(None, "write a page about all ops to this file")


def run(settings: Check) -> int:
    """Check ops, print a table, and say what is beyond tolerance. Raises InputError, OSError."""
    chosen = _chosen(settings)
    backends = [target(device).backends[0] for device in settings.device]
    start_time, results = time.perf_counter(), list[Found]()
    with Count(sys.stderr, "checking", "op") as count:
        for i, name in enumerate(chosen):
            count(i + 1, len(chosen), name)
            try:
                results += check(name, backends, settings.seed)
            except Exception as error:  # a kernel that fails is one more thing to report
                message = f"{type(error).__name__}: {' '.join(str(error).split())}"
                results.append(Found(name, "", "", message, "", float("inf"), 0.0))
    seconds = time.perf_counter() - start_time
    print("\n".join(lines(results, seconds)))
    if settings.json:
        write_text(settings.json, json.dumps(plain(results, seconds), indent=1) + "\n")
    if settings.markdown:
        write_text(settings.markdown, page(results))
    failed = [result for result in results if not result.passed]
    for result in failed:
        say(str(result) if result.case == NO_KERNEL else f"beyond tolerance: {result}")
    return FAILED if failed else DONE


def _chosen(settings: Check) -> list[str]:
    op_names = names()
    for name in settings.ops:
        if name not in op_names:
            suggestion = did_you_mean(name, op_names) or f"; there are {', '.join(op_names)}"
            raise InputError(f"OPS: there is no op {name}{suggestion}")
    if settings.markdown and settings.ops:
        raise InputError("--markdown writes a page about all ops; give no names")
    for file, flag in ((settings.json, "--json"), (settings.markdown, "--markdown")):
        if file:
            check_writable(file, flag)
    return list(dict.fromkeys(settings.ops)) or op_names
