"""Whole training steps beside PyTorch's: eager and compiled, in f32 and with bf16 autocast; same values and tokens."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from packtrain import kernels
from packtrain.common.events import Counted
from packtrain.devtools.bench.bench_table import Table, Value
from packtrain.devtools.bench.peer_process import Peer, PeerFailed
from packtrain.devtools.bench.products import TORCH, WITHOUT, Counting, has_torch
from packtrain.devtools.bench.timing import Side, paired
from packtrain.devtools.bench.training import ROWS
from packtrain.kernels.runtime import multiplies
from packtrain.models.config import PRESETS

WARM = 2  # steps whose time does not count; the first compiles, the last is watched for memory
OURS, EAGER, COMPILED = "packtrain", "PyTorch eager", "PyTorch compiled"
F32, BF16 = "f32", "bf16 autocast"
COLUMNS = {
    "program": "", "precision": "", "ms": ".1f", "tokens/s": ",.0f", "ours × as fast": ".2f", "peak MiB": ".0f",
    "ours × memory": ".2f", "loss": ".4f", "waited": ".0%",
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Trained(Side):
    """A program that trains a preset."""

    warm: int = WARM
    memory: int | None = None  # to which ours keeps

    def peer(self, preset: str) -> Peer:
        if self.program == OURS:
            args = kernels.threads(), preset, self.precision, self.memory
            return Peer("packtrain.devtools.bench.training", "peer", *args)
        options = self.program == COMPILED, self.precision == BF16
        return Peer(TORCH, "steps", kernels.threads(), preset, *options)


def compared() -> Iterator[tuple[str, str]]:
    """Our precisions beside PyTorch's: bf16 and bf16x3 where the CPU multiplies them."""
    yield F32, F32
    if has_torch():
        if multiplies("bf16x3"):
            yield "bf16x3", F32
        yield "bf16" if multiplies("bf16") else F32, BF16


def tables(
    presets: Sequence[str], rounds: int, counting: Counting, memory: int | None = None
) -> Iterator[Table]:
    """A table for each preset; ours runs anew beside each precision, so that three programs at most are in memory.

    memory  limit of the private memory of ours in bytes
    """
    for preset in presets:
        rows, notes = list[list[Value]](), list[str]()
        for ours, precision in compared():
            sides = [Trained(program=OURS, precision=ours, memory=memory)]
            sides += (
                [Trained(program=p, precision=precision) for p in (EAGER, COMPILED)]
                if has_torch()
                else []
            )
            with counting(f"steps of {preset}, {ours} beside {precision}", "round") as count:
                notes += run(sides, preset, rounds, count)
            rows += rows_of(sides, tokens_of(preset))
            notes += [] if len(sides) == 1 else [verdict(sides)]
        busy = max(float(row[-1] or 0) for row in rows)
        title = title_of(preset)
        title += f"; ours planned for {memory / 2**20:,.0f} MiB" if memory is not None else ""
        yield Table("steps", title, COLUMNS, rows, notes or [WITHOUT], busy)


def title_of(preset: str) -> str:
    time = PRESETS[preset].context_length
    return f"Whole steps of {preset}, {ROWS[preset]} × {time} tokens, clipping and AdamW included"


def tokens_of(preset: str) -> int:
    return ROWS[preset] * PRESETS[preset].context_length


def run(sides: list[Trained], preset: str, rounds: int, count: Counted) -> list[str]:
    """Steps in turn; a peer that fails is dropped from `sides`. Returns what is said of those."""
    said = list[str]()
    with ExitStack() as stack:
        peers = dict[str, Peer]()
        for turn in range(WARM + rounds):
            count(turn + 1, WARM + rounds)
            for side in [*sides]:
                try:
                    if turn == 0:
                        peers[side.program] = stack.enter_context(side.peer(preset))
                    side.steps.append(peers[side.program](turn == WARM - 1))
                except PeerFailed as error:
                    if side.program == OURS:
                        raise PeerFailed(f"{OURS} failed: {error}") from None
                    sides.remove(side)
                    said.append(f"{side.program} in {side.precision} failed: {error}")
    return said


def rows_of(sides: Sequence[Side], tokens: int) -> Iterator[list[Value]]:
    ours = sides[0]
    for side in sides:
        seconds = statistics.median(side.seconds)
        ratios = [paired(ours.seconds, side.seconds), ours.nbytes / side.nbytes]
        speed, memory = [None, None] if side is ours else ratios
        yield [
            *(side.program, side.precision, 1e3 * seconds, tokens / seconds, speed),
            *(side.nbytes / 2**20, memory, side.steps[-1].loss, side.waited),
        ]


def verdict(sides: Sequence[Side]) -> str:
    """Against the better of eager and compiled."""
    ours, *peers = sides
    best = min(peers, key=lambda side: statistics.median(side.seconds))
    return (
        f"packtrain in {ours.precision} is {paired(ours.seconds, best.seconds):.2f} × as fast as the better of"
        f" PyTorch's in {best.precision} ({best.program.split()[1]}), with {ours.nbytes / best.nbytes:.2f} of its"
        " private memory."
    )
