"""Times whole training steps of presets, each in a child process, whose private memory is that of its step."""

import statistics
from collections.abc import Iterator, Sequence

from packtrain import kernels
from packtrain.common.child_process import run_in_child
from packtrain.common.errors import InputError
from packtrain.devtools.bench.bench_table import BenchTable, CellValue
from packtrain.devtools.bench.products import ProgressCounter
from packtrain.devtools.bench.timing import BenchProgram, TimedStep
from packtrain.devtools.bench.training import ROWS, prepare_timed_steps
from packtrain.models.config import PRESETS

WARM = 2  # steps whose time does not count; the first loads pages, the last is watched for memory
COLUMNS = {
    "model": "", "ms": ".1f", "tokens/s": ",.0f", "peak MiB": ".0f", "loss": ".4f", "waited": ".0%",
}  # fmt: skip


def tables(
    presets: Sequence[str], rounds: int, counting: ProgressCounter, memory: int | None = None
) -> Iterator[BenchTable]:
    """Yield the table of all presets' steps, in f32, each timed `rounds` times within `memory` bytes of private memory;
    shows progress by `counting`. Raises InputError if a step does not fit."""
    programs = list[BenchProgram]()
    with counting("steps", "model") as count:
        for i, preset in enumerate(presets):
            count(i + 1, len(presets))
            args = kernels.threads(), preset, rounds, memory
            steps = run_in_child(lambda: None, measure_steps, *args)
            if isinstance(steps, InputError):
                raise steps
            programs.append(BenchProgram(name=preset, num_warmup=WARM, steps=steps))
    rows = [program_row(program, tokens_per_step(program.name)) for program in programs]
    title = "Whole steps in f32, clipping and AdamW included" + memory_title(memory)
    yield BenchTable("steps", title, COLUMNS, rows, (), max(p.waited_share for p in programs))


def measure_steps(
    threads: int, preset: str, rounds: int, memory: int | None
) -> list[TimedStep] | InputError:
    """Time WARM + `rounds` steps of a preset in this process; returns the error if no step fits `memory` bytes."""
    try:
        step = prepare_timed_steps(threads, preset, "f32", memory)
    except InputError as error:
        return error
    return [step(i == WARM - 1) for i in range(WARM + rounds)]


def program_row(program: BenchProgram, tokens: int) -> list[CellValue]:
    seconds = statistics.median(program.seconds)
    name = f"{program.name}, {ROWS[program.name]} × {PRESETS[program.name].context_length} tokens"
    figures = 1e3 * seconds, tokens / seconds, program.nbytes / 2**20, program.steps[-1].loss
    return [name, *figures, program.waited_share]


def tokens_per_step(preset: str) -> int:
    return ROWS[preset] * PRESETS[preset].context_length


def memory_title(memory: int | None) -> str:
    return f"; ours planned for {memory / 2**20:,.0f} MiB" if memory is not None else ""
