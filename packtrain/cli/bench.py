"""packtrain bench: measure this machine, ops, products and training steps; benchmarks.bench adds PyTorch and llama.cpp.

`python -m benchmarks.bench`, which adds PyTorch and llama.cpp, lies in a checkout and is not installed.
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
from packtrain.cli import DONE
from packtrain.common.events import Counted
from packtrain.common.files import check_writable, require_existing, write_text
from packtrain.common.memory import parse_size, release_memory
from packtrain.common.option_rules import check_rules
from packtrain.common.options import option, positional
from packtrain.devtools.bench import bench_ops, machine_rates, products, step_timing, training
from packtrain.devtools.bench.bench_table import BenchTable
from packtrain.devtools.bench.timing import ProcessorWait
from packtrain.models.config import PRESETS
from packtrain.models.model_file import open_model
from packtrain.planner.speed_probe import MAX_WAIT_SHARE
from packtrain.training.monitoring.progress import WorkCounter

BENCH_PARTS = "machine", "ops", "products", "steps"
QUICK_PARTS = BENCH_PARTS[:3]
SHORT_ROUNDS = 3
PAGE = """# Speed

Written by `packtrain bench --markdown`.
"""


@dataclass(frozen=True)
class BenchSettings:
    """Measure speed. On a busy machine the figures are lower than they should be, which is said."""

    base: Path | None = positional("a GGUF model: the ops of a LoRA step on it", None)
    part: tuple[str, ...] = option(
        (), "what to measure, if not all; may be repeated", choices=BENCH_PARTS
    )
    preset: tuple[str, ...] = option(
        ("15m", "110m"), "model whose steps are measured; may be repeated", choices=tuple(PRESETS)
    )
    memory: str | None = option(
        None, "private memory that our side of whole steps is planned for, such as 2GiB", metavar="SIZE",
        requires={"measures_steps": "{flag} is for whole steps: add --part steps, or leave it out"},
    )  # fmt: skip
    rounds: int = option(7, "rounds of each measurement, whose median counts", min_value=1)
    short: bool = option(False, "measure a few things, in less than a minute")
    json: Path | None = option(None, "write the figures as JSON to this file")
    markdown: Path | None = option(None, "write the figures as a page to this file")

    @property
    def parts(self) -> tuple[str, ...]:
        return self.part or (QUICK_PARTS if self.short else BENCH_PARTS)

    @property
    def measures_steps(self) -> bool:
        return "steps" in self.parts

    @property
    def limit(self) -> int | None:
        """--memory in bytes, or None for no limit. Raises InputError."""
        return None if self.memory is None else parse_size(self.memory, "--memory")

    @property
    def presets(self) -> tuple[str, ...]:
        preset_names = tuple(dict.fromkeys(self.preset))
        return preset_names[:1] if self.short else preset_names


def run(settings: BenchSettings) -> int:
    """Measure, print a table after each measurement, and return the exit code. Raises InputError, OSError."""
    return report(settings, measured_tables)


def report(settings: BenchSettings, measure_tables: Callable[[Any], Iterator[BenchTable]]) -> int:
    """Print each table as it is measured, then write the files; returns the exit code. Raises InputError, OSError."""
    check_rules(settings)
    _ = settings.limit  # raises InputError for what is no size
    check_writable(settings.json, "--json")
    check_writable(settings.markdown, "--markdown")
    if settings.base:
        require_existing(settings.base, "BASE")
        open_model(settings.base)
    kernels.load_all()
    about, tables = machine_rates.describe_machine(), list[BenchTable]()
    print(machine_rates.sentence(about), flush=True)
    with ProcessorWait() as quiet:
        for table in measure_tables(settings):
            print(f"\n{table.text()}", flush=True)
            tables.append(table)
    wait_share = max([quiet.waited_share, *(table.waited_share for table in tables)])
    verdict = "The machine was quiet."
    if wait_share >= MAX_WAIT_SHARE:
        wait_text = f"threads waited for the processor for {wait_share:.2f} s of each second"
        verdict = f"The machine was busy ({wait_text}): only ratios mean anything, and little."
    print(f"\n{verdict}")
    if settings.json:
        report_data = {**about, "waited": wait_share, "quiet": wait_share < MAX_WAIT_SHARE}
        report_data["tables"] = [table.to_json() for table in tables]
        write_text(settings.json, json.dumps(report_data, indent=1) + "\n")
    if settings.markdown:
        opening = [PAGE, machine_rates.sentence(about) + ".", verdict, ""]
        page_parts = [*opening, *(table.markdown() for table in tables)]
        write_text(settings.markdown, "\n".join(page_parts))
    return DONE


def measured_tables(
    settings: BenchSettings, measure_f32_products: Callable[..., BenchTable] = products.f32_table,
    measure_steps: Callable[..., Iterator[BenchTable]] = step_timing.tables,
) -> Iterator[BenchTable]:  # fmt: skip
    """Measure the requested parts, and yield a table for each; benchmarks.bench replaces the measurements of two."""
    selected_parts, rounds = settings.parts, SHORT_ROUNDS if settings.short else settings.rounds
    if {"machine", "ops"} & {*selected_parts}:
        rates = machine_rates.measure_rates()
        yield machine_rates.rates_table(rates)
    if "ops" in selected_parts:
        training_makers = dict[str, Callable[[], training.TrainingBench]]()
        training_makers |= {name: partial(training.of_preset, name) for name in settings.presets}
        if settings.base:
            training_makers[settings.base.name] = partial(training.of_base, settings.base)
        with WorkCounter(sys.stderr, "ops", "step") as counter:
            for i, (name, make_training) in enumerate(training_makers.items()):
                counter(i + 1, len(training_makers), name)
                yield bench_ops.measure_ops(make_training(), rates, rounds)[0]
                release_memory()  # the session of the training is gone
    if "products" in selected_parts:
        yield from products.tables(settings.short, rounds, progress_counter, measure_f32_products)
    if "steps" in selected_parts:
        yield from measure_steps(settings.presets, rounds, progress_counter, settings.limit)


@contextmanager
def progress_counter(label: str, unit: str) -> Iterator[Counted]:
    with WorkCounter(sys.stderr, label, unit) as counter:
        yield counter
