"""Whole training steps beside PyTorch's: eager and compiled, in f32 and with bf16 autocast; same values and tokens."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.peer_process import PeerError, PeerProcess
from packtrain import kernels
from packtrain.common.events import Counted
from packtrain.devtools.bench.bench_table import BenchTable, CellValue
from packtrain.devtools.bench.products import ProgressCounter
from packtrain.devtools.bench.step_timing import WARM, memory_title, tokens_per_step
from packtrain.devtools.bench.timing import BenchProgram, paired
from packtrain.devtools.bench.training import ROWS
from packtrain.kernels.runtime.environment import supports_precision
from packtrain.models.config import PRESETS

OURS, EAGER, COMPILED = "packtrain", "PyTorch eager", "PyTorch compiled"
F32, BF16 = "f32", "bf16 autocast"
COLUMNS = {
    "program": "", "precision": "", "ms": ".1f", "tokens/s": ",.0f", "ours × as fast": ".2f", "peak MiB": ".0f",
    "ours × memory": ".2f", "loss": ".4f", "waited": ".0%",
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class TrainingProgram(BenchProgram):
    """A program that trains a preset."""

    num_warmup: int = WARM
    memory: int | None = None  # limit of our private memory in bytes

    def peer(self, preset: str) -> PeerProcess:
        if self.name == OURS:
            args = kernels.threads(), preset, self.precision, self.memory
            return PeerProcess("packtrain.devtools.bench.training", "prepare_timed_steps", *args)
        options = self.name == COMPILED, self.precision == BF16
        return PeerProcess("benchmarks.torch_peer", "steps", kernels.threads(), preset, *options)


def precision_pairs() -> Iterator[tuple[str, str]]:
    """Yield our precisions, each with PyTorch's beside it: bf16 and bf16x3 where the CPU multiplies them."""
    yield F32, F32
    if supports_precision("bf16x3"):
        yield "bf16x3", F32
    yield "bf16" if supports_precision("bf16") else F32, BF16


def tables(
    presets: Sequence[str], rounds: int, counting: ProgressCounter, memory: int | None = None
) -> Iterator[BenchTable]:
    """Yield a table per preset; ours runs anew beside each precision, so that at most three programs are in memory.

    memory  limit of the private memory of ours in bytes
    """
    for preset in presets:
        rows, notes = list[list[CellValue]](), list[str]()
        for ours, peer_precision in precision_pairs():
            programs = [TrainingProgram(name=OURS, precision=ours, memory=memory)]
            programs += [
                TrainingProgram(name=p, precision=peer_precision) for p in (EAGER, COMPILED)
            ]
            with counting(f"steps of {preset}, {ours} beside {peer_precision}", "round") as count:
                notes += run(programs, preset, rounds, count)
            rows += rows_of(programs, tokens_per_step(preset))
            notes += [] if len(programs) == 1 else [verdict(programs)]
        max_waited = max(float(row[-1] or 0) for row in rows)
        size = f"{ROWS[preset]} × {PRESETS[preset].context_length} tokens"
        title = f"Whole steps of {preset}, {size}, clipping and AdamW included"
        title += memory_title(memory)
        yield BenchTable("steps", title, COLUMNS, rows, notes, max_waited)


def run(programs: list[TrainingProgram], preset: str, rounds: int, count: Counted) -> list[str]:
    """Run steps of all programs in turn; drops failed peers from `programs` and returns messages about them."""
    messages = list[str]()
    with ExitStack() as stack:
        peers = dict[str, PeerProcess]()
        for step_index in range(WARM + rounds):
            count(step_index + 1, WARM + rounds)
            for program in [*programs]:
                try:
                    if step_index == 0:
                        peers[program.name] = stack.enter_context(program.peer(preset))
                    program.steps.append(peers[program.name](step_index == WARM - 1))
                except PeerError as error:
                    if program.name == OURS:
                        raise PeerError(f"{OURS} failed: {error}") from None
                    programs.remove(program)
                    messages.append(f"{program.name} in {program.precision} failed: {error}")
    return messages


def rows_of(programs: Sequence[BenchProgram], tokens: int) -> Iterator[list[CellValue]]:
    our_program = programs[0]
    for program in programs:
        seconds = statistics.median(program.seconds)
        ratios = [paired(our_program.seconds, program.seconds), our_program.nbytes / program.nbytes]
        speed, memory = [None, None] if program is our_program else ratios
        yield [
            *(program.name, program.precision, 1e3 * seconds, tokens / seconds, speed),
            *(program.nbytes / 2**20, memory, program.steps[-1].loss, program.waited_share),
        ]


def verdict(programs: Sequence[BenchProgram]) -> str:
    """Compare ours with the better of PyTorch's eager and compiled, in one sentence."""
    ours, *peers = programs
    best = min(peers, key=lambda program: statistics.median(program.seconds))
    return (
        f"packtrain in {ours.precision} is {paired(ours.seconds, best.seconds):.2f} × as fast as the better of"
        f" PyTorch's in {best.precision} ({best.name.split()[1]}), with {ours.nbytes / best.nbytes:.2f} of its"
        " private memory."
    )
