"""packtrain bench: measure this machine, ops, products and steps of training; benchmarks.bench adds llama.cpp.

`python -m benchmarks.bench` and the side of PyTorch in products and steps lie in a checkout and are not installed.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from packtrain import kernels
from packtrain.cli import DONE, FAILED, say
from packtrain.common.errors import InputError
from packtrain.common.events import Counted
from packtrain.common.files import check_writable, existing, write_text
from packtrain.common.memory import parse_size, settle
from packtrain.common.options import option, positional
from packtrain.devtools.bench import bench_ops, machine_rates, products, step_timing, training
from packtrain.devtools.bench.bench_table import Table
from packtrain.devtools.bench.peer_process import PeerFailed
from packtrain.devtools.bench.timing import Quiet
from packtrain.models.config import PRESETS
from packtrain.models.model_file import open_model
from packtrain.planner.speed_probe import WAITED
from packtrain.training.monitoring.work_progress import Count

PARTS = "machine", "ops", "products", "steps"
QUICK = PARTS[:3]
SHORT_ROUNDS = 3
PAGE = """# Speed

Written by `packtrain bench --markdown`.
"""


@dataclass(frozen=True)
class Bench:
    """Measure speed. On a busy machine the figures are lower than they should be, which is said."""

    base: Path | None = positional("a GGUF model: the ops of a LoRA step on it", None)
    part: tuple[str, ...] = option(
        (), "what to measure, if not all; may be repeated", choices=PARTS
    )
    preset: tuple[str, ...] = option(
        ("15m", "110m"), "model whose steps are measured; may be repeated", choices=tuple(PRESETS)
    )
    memory: str | None = option(
        None,
        "private memory that our side of whole steps is planned for, such as 2GiB",
        metavar="SIZE",
    )
    rounds: int = option(7, "rounds of each measurement, whose median counts", least=1)
    short: bool = option(False, "measure a few things, in less than a minute")
    json: Path | None = option(None, "write the figures as JSON to this file")
    markdown: Path | None = option(None, "write the figures as a page to this file")

    @property
    def parts(self) -> tuple[str, ...]:
        return self.part or (QUICK if self.short else PARTS)

    @property
    def limit(self) -> int | None:
        """--memory in bytes. Raises InputError."""
        return None if self.memory is None else parse_size(self.memory, "--memory")

    @property
    def presets(self) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(self.preset))
        return names[:1] if self.short else names


def run(settings: Bench) -> int:
    """Measure, and print a table after each measurement. Raises InputError, OSError."""
    return report(settings, measured)


def report(settings: Bench, measured: Callable[[Any], Iterator[Table]]) -> int:
    """Print each table as it is measured, then write the files. Raises InputError, OSError."""
    checked(settings)
    kernels.load_all()
    about, tables = machine_rates.about(), list[Table]()
    print(machine_rates.sentence(about), flush=True)
    try:
        with Quiet() as quiet:
            for table in measured(settings):
                print(f"\n{table.text()}", flush=True)
                tables.append(table)
    except PeerFailed as error:
        say(f"packtrain: error: {error}")
        return FAILED
    waited = max([quiet.share, *(table.waited for table in tables)])
    verdict = quiet_or_not(waited)
    print(f"\n{verdict}")
    if settings.json:
        result = {**about, "waited": waited, "quiet": waited < WAITED}
        result["tables"] = [table.plain() for table in tables]
        write_text(settings.json, json.dumps(result, indent=1) + "\n")
    if settings.markdown:
        texts = [table.markdown() for table in tables]
        write_text(
            settings.markdown,
            "\n".join([PAGE, machine_rates.sentence(about) + ".", verdict, "", *texts]),
        )
    return DONE


def checked(settings: Bench) -> None:
    """Raises InputError for what cannot be read or written, before any work."""
    if settings.limit is not None and "steps" not in settings.parts:
        raise InputError("--memory is for whole steps: add --part steps, or leave it out")
    for file, flag in ((settings.json, "--json"), (settings.markdown, "--markdown")):
        if file:
            check_writable(file, flag)
    if settings.base:
        existing(settings.base, "BASE")
        open_model(settings.base)


def quiet_or_not(waited: float) -> str:
    if waited < WAITED:
        return "The machine was quiet."
    share = f"threads waited for the processor for {waited:.2f} s of each second"
    return f"The machine was busy ({share}): only ratios mean something, and those little."


def measured(settings: Bench) -> Iterator[Table]:
    """The tables of all parts that were asked for."""
    parts, rounds = settings.parts, SHORT_ROUNDS if settings.short else settings.rounds
    if {"machine", "ops"} & {*parts}:
        rates = machine_rates.measured()
        yield machine_rates.table(rates)
    if "ops" in parts:
        makers = dict[str, Callable[[], training.Training]]()
        makers |= {name: partial(training.of_preset, name) for name in settings.presets}
        if settings.base:
            makers[settings.base.name] = partial(training.of_base, settings.base)
        with Count(sys.stderr, "ops", "step") as count:
            for i, (name, make) in enumerate(makers.items()):
                count(i + 1, len(makers), name)
                yield bench_ops.measured(make(), rates, rounds)[0]
                settle()  # its session is gone
    if "products" in parts:
        yield from products.tables(settings.short, rounds, counting)
    if "steps" in parts:
        yield from step_timing.tables(settings.presets, rounds, counting, settings.limit)


@contextmanager
def counting(label: str, part: str) -> Iterator[Counted]:
    with Count(sys.stderr, label, part) as count:
        yield count
