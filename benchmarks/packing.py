"""Arenas of training steps and MiniMalloc's problems, packed: the lower bound, what was reached, ggml's best fit.

    python -m benchmarks.packing
    python benchmarks/packing.py --csv FILE [--capacity N] [--seconds S] --solution OUT.csv

The second form takes any problem in MiniMalloc's format (id,lower,upper,size; alive in [lower, upper)), writes
`id,offset`, and exits with 2 if it cannot use what it is given, with 3 if it found nothing within the capacity.
The first form plans only: nothing is allocated. Its last columns are the lower bound of the written order beside
those of two depth-first orders, which read the same graph from its outputs, first input first (left) or last
input first (right). MiniMalloc's problems are read from ../shared/data/minimalloc where they are.
"""

# ruff: noqa: E402
import time

START_SECONDS = time.monotonic()  # the imports count, too

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

import packtrain as pt
from packtrain import kernels
from packtrain.common.errors import InputError
from packtrain.common.files import atomic_file, check_writable, require_existing
from packtrain.engine.memory_plan import size_text
from packtrain.engine.memory_plan.lifetimes import storage_lifetimes
from packtrain.engine.optim import AdamW, training_graph
from packtrain.engine.packing import Packing, lower_bound, packing_height, packings
from packtrain.engine.placement import Placed
from packtrain.engine.step import KernelStep
from packtrain.engine.tensor import Call, Tensor
from packtrain.models import transformer
from packtrain.models.config import PRESETS, Config
from tests.online import best_fit
from tests.overlap import find_overlap

PROBLEMS = Path(__file__).parent.parent.parent / "shared/data/minimalloc/challenging"
COLUMNS = ("id", "lower", "upper", "size")
SECONDS = 20.0
BAD_INPUT, NO_FIT = 2, 3

MIXTURE = Config(
    32_000, 2_048, 1_024, 24, 3_584, 16, 8, tied=False, expert_count=8, expert_used_count=2
)
# name: shape, rows, tokens in each
SHAPES = {
    "1m": (PRESETS["1m"], 4, 256),
    "15m": (PRESETS["15m"], 4, 256),
    "110m": (PRESETS["110m"], 1, 512),
    "SmolLM2-135M": (Config(49_152, 2_048, 576, 30, 1_536, 9, 3), 1, 512),
    "Qwen2.5-0.5B": (Config(151_936, 2_048, 896, 24, 4_864, 14, 2), 1, 512),
    "Llama-3.2-1B": (Config(128_256, 2_048, 2_048, 16, 8_192, 32, 8), 1, 512),
    "Llama-3.2-3B": (Config(128_256, 2_048, 3_072, 28, 8_192, 24, 8), 1, 512),
    "8 experts": (MIXTURE, 1, 512),
    "Llama-3.1-8B": (Config(128_256, 2_048, 4_096, 32, 14_336, 32, 8, tied=False), 1, 512),
}
RECOMPUTED = ("none", "half", "all")  # of the blocks
TRAINED = ("full", "clipped", "few")  # few: the norms of the blocks only, as adapters are
Columns = tuple[np.ndarray, np.ndarray, np.ndarray]


# ---- training steps --------------------------------------------------------------------------------------------


def step_graph(name: str, recomputed: str, trained: str) -> pt.Graph:
    config, rows, tokens = SHAPES[name]
    weights = transformer.weights(config)
    model_loss = transformer.loss(config, weights, rows, tokens)
    leaves = [w for w in weights.values() if trained != "few" or "attn_norm" in w.label]
    max_norm = 1.0 if trained == "clipped" else None
    keep = tensors_to_keep(model_loss, recomputed)
    return training_graph({"loss": model_loss.loss}, leaves, AdamW(), keep=keep, max_norm=max_norm)


def tensors_to_keep(model_loss: transformer.LossOutputs, recomputed: str) -> list[Tensor] | None:
    """The values to keep so that no block, the first half of the blocks or all are recomputed."""
    if recomputed == "none":
        return None
    block_ends = {t.call: i for i, t in enumerate(model_loss.block_outputs)}
    values, block = list(model_loss.block_outputs), 0
    for call in pt.Graph({"loss": model_loss.loss}).calls:
        if recomputed == "half" and block > len(block_ends) // 2:
            values += call.results
        block = max(block, block_ends.get(call, -1) + 1)
    return values


def depth_first(graph: pt.Graph, *, left: bool) -> list[Call]:
    """The calls in the order of a depth-first walk from the outputs; writes after all that read the leaf before."""
    readers: dict[pt.Tensor, list[Call]] = {}
    for call in graph.calls:
        for t in call.reads:
            if t.base.kind in ("weight", "state") and not call.op.writes:
                readers.setdefault(t.base, []).append(call)
    order: dict[Call, None] = {}
    stack = [(t.call, False) for t in (*graph.updates, *graph.outputs.values()) if t.call]
    stack = stack[::-1] if left else stack
    while stack:
        call, is_expanded = stack.pop()
        if call in order:
            continue
        if is_expanded:
            order[call] = None
            continue
        stack.append((call, True))
        callees = [t.call for t in call.reads if t.call]
        for index in call.op.writes:
            leaf = call.inputs[index]
            assert leaf is not None
            callees += readers.get(leaf.base, [])
        stack.extend((c, False) for c in (callees[::-1] if left else callees) if c not in order)
    return list(order)


def bound_of(placed: Placed, order: Iterable[Call]) -> int:
    """The lower bound of the same steps in another order, nothing done in place differently."""
    steps: dict[Call, list[KernelStep]] = {}
    for step in placed.steps:
        steps.setdefault(step.call, []).append(step)
    moved = [step for call in order for step in steps.get(call, ())]
    assert len(moved) == len(placed.steps)
    buffers = storage_lifetimes(Placed(placed.graph, tuple(moved), placed.home, placed.names))
    columns = (
        [s.start for s in buffers],
        [s.end for s in buffers],
        [-(-s.nbytes // 64) * 64 for s in buffers],
    )
    return lower_bound(*(np.array(c, np.int64) for c in columns))[0]


def graphs() -> None:
    print(
        f"{'shape':13} {'recompute':9} {'trained':8} {'ops':>5} {'lower bound':>12} {'arena':>12} {'gap':>7} "
        f"{'best_fit':>8} {'plan s':>7} {'left':>12} {'right':>12}"
    )
    gaps, slowest = [], 0.0
    for name in SHAPES:
        for recomputed in RECOMPUTED:
            for trained in TRAINED:
                graph = step_graph(name, recomputed, trained)
                placed = pt.place(graph)
                start_seconds = time.perf_counter()
                arena = pt.make_plan(placed).arena()
                seconds = time.perf_counter() - start_seconds
                online = pt.make_plan(placed, packer=best_fit).arena()
                order_bounds = [
                    bound_of(placed, depth_first(graph, left=left)) for left in (True, False)
                ]
                gaps.append(arena.gap)
                slowest = max(slowest, seconds)
                print(
                    f"{name:13} {recomputed:9} {trained:8} {len(placed.steps):5} "
                    f"{size_text(arena.lower_bound):>12} {size_text(arena.nbytes):>12} {arena.gap:7.3%} "
                    f"{online.gap:8.3%} {seconds:7.3f} {size_text(order_bounds[0]):>12}"
                    f" {size_text(order_bounds[1]):>12}"
                )
    print(
        f"at the lower bound: {gaps.count(0.0)} of {len(gaps)}, largest gap {max(gaps):.3%}, slowest {slowest:.3f} s"
    )


# ---- problems in files -----------------------------------------------------------------------------------------


def read_lifetimes(path: Path) -> tuple[list[str], Columns]:
    """Names and lifetimes from a CSV file. Raises InputError with its name and line."""
    try:
        text = require_existing(path, "--csv").read_text(encoding="utf-8")
        reader = csv.DictReader(text.splitlines())
        rows = [(reader.line_num, row) for row in reader]
    except (UnicodeDecodeError, csv.Error, OSError) as error:
        raise InputError(f"--csv: {path} is not a CSV file: {error}") from None
    if not rows:
        raise InputError(f"--csv: {path} has no buffers; {','.join(COLUMNS)} and a line for each")
    if sorted(reader.fieldnames or ()) != sorted(COLUMNS):
        raise InputError(f"--csv: {path} line 1: the columns must be {','.join(COLUMNS)}")
    names, numbers = [], []
    for line, row in rows:
        location = f"--csv: {path} line {line}"
        if None in row:
            raise InputError(
                f"{location}: {len(COLUMNS)} columns are needed, not {len(COLUMNS) + len(row[None])}"
            )
        names.append(row["id"])
        numbers.append([parse_int(row[column], f"{location}: {column}") for column in COLUMNS[1:]])
        lower, upper, size = numbers[-1]
        if upper <= lower or size < 1:
            raise InputError(
                f"{location}: [{lower}, {upper}) of size {size}; lower < upper, size > 0"
            )
    if len(set(names)) < len(names):
        duplicate, _ = Counter(names).most_common(1)[0]
        raise InputError(f"--csv: {path}: id {duplicate} is there twice")
    start, end, sizes = np.array(numbers, np.int64).T
    return names, (start, end, sizes)


def parse_int(text: str | None, location: str) -> int:
    try:
        value = int(text or "")
    except ValueError:
        raise InputError(f"{location} is {text or ''!r}; a whole number is needed") from None
    if abs(value) >= 1 << 62:
        raise InputError(f"{location} is {value}; it must have less than 63 bits")
    return value


def timed_packing(columns: Columns, target_height: int, seconds: float) -> tuple[Packing, float]:
    """The best packing, checked, and the seconds it took."""
    start_time = time.perf_counter()
    *_, best = packings(*columns, target_height=target_height, seconds=seconds)
    elapsed = time.perf_counter() - start_time
    collision = find_overlap(*columns, best.offsets)
    assert collision is None, f"buffers {collision} share bytes"
    return best, elapsed


def certificate(best: Packing) -> str:
    """What is known of a packing, in one line."""
    proof = "no packing is lower" if best.is_optimal else "not proved lowest"
    return (
        f"height {best.nbytes:,}, lower bound {best.bound_nbytes:,} (alive at {best.peak_step:,}), gap {best.gap:.3%}, "
        f"{proof}"
    )


def solve(path: Path, capacity: int, seconds: float, solution: Path, start_time: float) -> int:
    """Pack the problem in a file and write the solution, in seconds from when it began; the exit code."""
    check_writable(solution, "--solution")
    opened = time.monotonic()
    names, columns = read_lifetimes(path)
    now = time.monotonic()
    remaining_s = (
        seconds - (now - start_time) - 2 * (now - opened)
    )  # to check and write takes less than that
    try:
        best, elapsed = timed_packing(columns, capacity, max(remaining_s, 0.0))
    except ValueError as error:
        raise InputError(f"--csv: {path}: {error}") from None
    print(f"{len(names):,} buffers: {certificate(best)}; {elapsed:.2f} s")
    if capacity and best.nbytes > capacity:
        reason = "it cannot be" if best.is_optimal else f"not found in {seconds:g} s"
        print(f"packing: within {capacity:,}: {reason}; nothing is written", file=sys.stderr)
        return NO_FIT
    lines = [f"{name},{offset}" for name, offset in zip(names, best.offsets, strict=True)]
    with atomic_file(solution) as file:
        file.write("\n".join(["id,offset", *lines, ""]).encode())
    return 0


def problems() -> Iterator[tuple[str, int, Columns]]:
    """Name, capacity and lifetimes of MiniMalloc's problems."""
    for file in sorted(PROBLEMS.glob("*.csv")):
        name, capacity, _ = file.name.split(".")
        yield name, int(capacity), read_lifetimes(file)[1]


def minimalloc() -> None:
    kernels.load_all()
    print(
        f"\n{'MiniMalloc':10} {'buffers':>7} {'lower bound':>12} {'height':>10} {'gap':>7} {'best_fit':>8} {'s':>7}"
    )
    total, loose = 0.0, []
    for name, capacity, columns in problems():
        best, elapsed = timed_packing(columns, capacity, SECONDS)
        online = packing_height(columns[2], best_fit(*columns)) / best.bound_nbytes - 1
        note = "" if best.nbytes <= capacity else f"  above the capacity {capacity:,}"
        total += elapsed
        print(
            f"{name:10} {len(columns[2]):7} {best.bound_nbytes:12,} {best.nbytes:10,} {best.gap:7.3%} {online:8.3%} "
            f"{elapsed:7.2f}{note}"
        )
        if best.nbytes > best.bound_nbytes:
            loose.append((name, columns))
    print(f"together {total:.2f} s")
    for name, columns in loose:
        best, elapsed = timed_packing(columns, 0, SECONDS)
        print(f"{name} as low as it gets in {elapsed:.0f} s: {certificate(best)}")


def main(start_time: float | None = None) -> int:
    start_time = time.monotonic() if start_time is None else start_time
    parser = argparse.ArgumentParser(description="Pack buffers of given lifetimes and sizes.")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="a problem: id,lower,upper,size")
    parser.add_argument("--solution", type=Path, metavar="OUT", help="where id,offset go")
    parser.add_argument(
        "--capacity", type=int, default=0, metavar="N", help="a height that will do"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help="when to end")
    args = parser.parse_args()
    try:
        if (args.csv is None) != (args.solution is None):
            raise InputError(
                "--csv and --solution belong together: give both, or none for the tables"
            )
        if args.capacity < 0 or not 0 <= args.seconds < float("inf"):
            raise InputError(
                "--capacity and --seconds must not be negative, --seconds must be finite"
            )
        if args.csv:
            return solve(args.csv, args.capacity, args.seconds, args.solution, start_time)
    except InputError as error:
        print(f"packing: error: {error}", file=sys.stderr)
        return BAD_INPUT
    graphs()
    if PROBLEMS.exists():
        minimalloc()
    return 0


if __name__ == "__main__":
    sys.exit(main(START_SECONDS))
