"""`packtrain bench` with PyTorch and llama.cpp beside it: python -m benchmarks.bench [BASE.gguf] [FLAG …]

python -m benchmarks.bench --part products --part steps        products and steps beside PyTorch
python -m benchmarks.bench --part llama --llama-bench PATH     reading and writing alone
python -m benchmarks.bench --help                              every flag; those of `packtrain bench` are the same
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from benchmarks import llama, torch_products, torch_steps
from benchmarks.command_line import run_command
from packtrain.cli import bench
from packtrain.common.files import require_existing
from packtrain.common.options import option, positional
from packtrain.devtools.bench.bench_table import BenchTable

PARTS = (*bench.BENCH_PARTS, "llama")
TORCH_PARTS = "products", "steps"  # tables that PyTorch has columns or rows in
NO_TORCH_NOTE = "Nothing is compared with PyTorch, which is not installed."


@dataclass(frozen=True)
class PeerBenchSettings(bench.BenchSettings):
    """Measure speed beside other programs."""

    base: Path | None = positional(
        "a GGUF model: the ops of a LoRA step on it, and reading and writing with it", None
    )
    part: tuple[str, ...] = option(
        (), "what to measure, if not all; may be repeated", choices=PARTS
    )
    llama_bench: Path | None = option(
        None, "llama.cpp's bench, if it is not llama-bench on the PATH"
    )

    @property
    def parts(self) -> tuple[str, ...]:
        return self.part or (bench.QUICK_PARTS if self.short else PARTS)


def run(settings: PeerBenchSettings) -> int:
    """Measure, and print a table after each measurement. Raises InputError, OSError."""
    if settings.llama_bench:
        require_existing(settings.llama_bench, "--llama-bench")
    program = llama.find_llama_bench(settings.llama_bench) if "llama" in settings.parts else None

    def measured(settings: PeerBenchSettings) -> Iterator[BenchTable]:
        if has_torch():
            yield from bench.measured_tables(settings, torch_products.f32_table, torch_steps.tables)
        else:
            yield from map(add_note, bench.measured_tables(settings))
        if "llama" in settings.parts:
            rounds = bench.SHORT_ROUNDS if settings.short else settings.rounds
            yield from llama.tables(settings.base, program, rounds, bench.progress_counter)

    return bench.report(settings, measured)


def has_torch() -> bool:
    return find_spec("torch") is not None


def add_note(table: BenchTable) -> BenchTable:
    """Say below a table that PyTorch would be in that it is not installed."""
    is_compared = table.name in TORCH_PARTS
    return replace(table, notes=(*table.notes, NO_TORCH_NOTE)) if is_compared else table


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command("benchmarks.bench", __doc__, PeerBenchSettings, run, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
