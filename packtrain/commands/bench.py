"""packtrain bench: measure this machine: its rates, the ops of a training step, products, and the same in PyTorch."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from packtrain import kernels
from packtrain.benching import llama, machine, ops, products, steps, training
from packtrain.benching.peer import PeerFailed
from packtrain.benching.table import Table
from packtrain.benching.timing import Quiet
from packtrain.commands import DONE, FAILED, say
from packtrain.errors import InputError
from packtrain.events import Counted
from packtrain.files import check_writable, existing, write_text
from packtrain.memory import parse_size, settle
from packtrain.models.config import PRESETS
from packtrain.models.file import open_model
from packtrain.settings import option, positional
from packtrain.speed import WAITED
from packtrain.watch.count import Count

PARTS = "machine", "ops", "products", "steps", "llama"
QUICK = PARTS[:3]
SHORT_ROUNDS = 3
PAGE = """# Speed

Written by `packtrain bench --markdown`.
"""


@dataclass(frozen=True)
class Bench:
    """Measure speed. On a busy machine the figures are lower than they should be, which is said."""

    base: Path | None = positional(
        "a GGUF model: the ops of a LoRA step on it, and reading and writing with it", None
    )
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
    llama_bench: Path | None = option(
        None, "llama.cpp's bench, if it is not llama-bench on the PATH"
    )
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
    bench = checked(settings)
    kernels.load_all()
    about, found = machine.about(), list[Table]()
    print(machine.sentence(about), flush=True)
    try:
        with Quiet() as quiet:
            for table in measured(settings, bench):
                print(f"\n{table.text()}", flush=True)
                found.append(table)
    except PeerFailed as error:
        say(f"packtrain: error: {error}")
        return FAILED
    waited = max([quiet.share, *(table.waited for table in found)])
    said = quiet_or_not(waited)
    print(f"\n{said}")
    if settings.json:
        made = {**about, "waited": waited, "quiet": waited < WAITED}
        made["tables"] = [table.plain() for table in found]
        write_text(settings.json, json.dumps(made, indent=1) + "\n")
    if settings.markdown:
        texts = [table.markdown() for table in found]
        write_text(
            settings.markdown, "\n".join([PAGE, machine.sentence(about) + ".", said, "", *texts])
        )
    return DONE


def checked(settings: Bench) -> Path | None:
    """llama-bench, if it is wanted and there. Raises InputError for what cannot be read or written, before any work."""
    if settings.limit is not None and "steps" not in settings.parts:
        raise InputError("--memory is for whole steps: add --part steps, or leave it out")
    for file, flag in ((settings.json, "--json"), (settings.markdown, "--markdown")):
        if file:
            check_writable(file, flag)
    for file, name in ((settings.base, "BASE"), (settings.llama_bench, "--llama-bench")):
        if file:
            existing(file, name)
    if settings.base:
        open_model(settings.base)
    return llama.program(settings.llama_bench) if "llama" in settings.parts else None


def quiet_or_not(waited: float) -> str:
    if waited < WAITED:
        return "The machine was quiet."
    share = f"threads waited for the processor for {waited:.2f} s of each second"
    return f"The machine was busy ({share}): only ratios mean something, and those little."


def measured(settings: Bench, bench: Path | None) -> Iterator[Table]:
    """The tables of all parts that were asked for."""
    parts, rounds = settings.parts, SHORT_ROUNDS if settings.short else settings.rounds
    if {"machine", "ops"} & {*parts}:
        rates = machine.measured()
        yield machine.table(rates)
    if "ops" in parts:
        makers = dict[str, Callable[[], training.Training]]()
        makers |= {name: partial(training.of_preset, name) for name in settings.presets}
        if settings.base:
            makers[settings.base.name] = partial(training.of_base, settings.base)
        with Count(sys.stderr, "ops", "step") as count:
            for i, (name, make) in enumerate(makers.items()):
                count(i + 1, len(makers), name)
                yield ops.measured(make(), rates, rounds)[0]
                settle()  # its session is gone
    if "products" in parts:
        yield from products.tables(settings.short, rounds, counting)
    if "steps" in parts:
        yield from steps.tables(settings.presets, rounds, counting, settings.limit)
    if "llama" in parts:
        yield from llama.tables(settings.base, bench, rounds, counting)


@contextmanager
def counting(what: str, part: str) -> Iterator[Counted]:
    with Count(sys.stderr, what, part) as count:
        yield count
