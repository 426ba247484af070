"""A step on a device beside PyTorch: python -m benchmarks.gpu [--device cuda] [--preset 15m] [--rounds 20]

    python -m benchmarks.gpu --base MODEL.gguf     a LoRA step on a llama, beside that step as PEFT computes it
    python -m benchmarks.gpu --kernels [--precision bf16]   what kernels of our step take, by PyTorch's profiler
    python -m benchmarks.gpu --device torch:cpu --preset 1m --rounds 3       a dry run where there is no GPU

All sides take the same steps of the same model on the same tokens, each in a process of its own, round by round.
Milliseconds are medians, of which the host waits for the device; memory is the most that PyTorch's allocator had of the
device, arenas of ours included. On a machine without the device it says so and ends with exit code 1.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer_process import PeerError, PeerProcess
from packtrain import kernels
from packtrain.common.errors import InputError
from packtrain.devtools.bench import training
from packtrain.devtools.bench.timing import paired
from packtrain.dtypes import PRECISIONS
from packtrain.engine.backends import target
from packtrain.kernels.quant.quantized_arrays import dequantize
from packtrain.models.config import PRESETS
from packtrain.models.model_file import open_model
from tests.models import initial_weights

WARM = 3  # steps that do not count: compiling, and tables made once
LIKE = 0.01  # by how much losses of the first step may differ, relatively
RANK, SCALE = 16, 2.0
OURS, EAGER, COMPILED = "packtrain", "PyTorch eager", "PyTorch compiled"
TF32 = "tf32"
SIDES = (
    *((OURS, precision) for precision in ("f32", "bf16x3", "bf16")),
    (EAGER, "f32"),
    *((COMPILED, precision) for precision in ("f32", TF32, "bf16")),
)
Turn = tuple[float, float, int]  # seconds, loss, bytes


@dataclass
class Side:
    """A program in a precision, and what its steps took."""

    program: str
    precision: str
    peer: PeerProcess
    turns: list[Turn] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [seconds for seconds, _, _ in self.turns[WARM:]]

    def turn(self) -> None:
        self.turns.append(self.peer())

    def __str__(self) -> str:
        return f"{self.program}, {self.precision}"


# ---- in processes of their own ------------------------------------------------------------------------------


def taking_turns(device: str, preset: str, base: Path | None, program: str, precision: str) -> Any:
    """A function that takes a step, and says what it took."""
    args = device, preset, base, precision
    return timed_turn(
        device, ours(*args) if program == OURS else theirs(*args, program == COMPILED)
    )


def timed_turn(device: str, step: Callable[[], float]) -> Callable[[], Turn]:
    cuda = kernels.torch().cuda if device.startswith("cuda") else None

    def turn() -> Turn:
        start_time = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - start_time
        return seconds, loss, int(cuda.max_memory_reserved()) if cuda else 0

    return turn


def ours(device: str, preset: str, base: Path | None, precision: str) -> Callable[[], float]:
    if base is None:
        return training.of_preset(preset, precision, device=device).step
    return training.of_base(base, precision=precision, device=device).step


def theirs(
    device: str, preset: str, base: Path | None, precision: str, compiled: bool
) -> Callable[[], float]:
    """The same step in PyTorch, which has weights unpacked, as transformers has those of a GGUF file."""
    from benchmarks import torch_peer
    from benchmarks.torch_llama import Llama, Tuned

    kernels.torch().set_float32_matmul_precision("high" if precision == TF32 else "highest")
    torch_device = "cpu" if device.startswith("torch:cpu") else device
    if base is None:
        config = PRESETS[preset]
        batch = training.batch_of(config, training.ROWS[preset], config.context_length)
        model: Any = Llama(config, initial_weights(config), real=compiled)
    else:
        file = open_model(base)
        config = file.config
        batch = training.batch_of(config, 1, min(training.FILE_CONTEXT, config.context_length))
        values = {name: unpacked(array) for name, array in file.stored().items()}
        model = Tuned(config, values, RANK, SCALE, real=compiled)
    return torch_peer.training(model, batch, compiled, precision == "bf16", torch_device)


def unpacked(array: np.ndarray) -> np.ndarray:
    return dequantize(array) if array.dtype.names else array.astype(np.float32)


# ---- a comparison -------------------------------------------------------------------------------------------


def compare_sides(title: str, sides: list[Side], rounds: int) -> bool:
    """Print the table; whether the losses of the first step agree. A side that fails is left out, and said."""
    with ExitStack() as stack, ThreadPoolExecutor(len(sides)) as pool:
        for side, failure in [*pool.map(lambda side: start_side(side, stack), sides)]:
            if failure:
                print(f"{side} failed: {failure}")
                sides.remove(side)
        for _ in range(rounds):
            for side in sides:
                side.turn()
    print(*lines_of(title, sides), sep="\n", flush=True)
    first_loss = sides[0].turns[0][1]
    return all(abs(side.turns[0][1] / first_loss - 1) <= LIKE for side in sides)


def start_side(side: Side, stack: ExitStack) -> tuple[Side, str]:
    """Start its process and take the steps that do not count, which may go on beside those of others."""
    try:
        stack.enter_context(side.peer)
        for _ in range(WARM):
            side.turn()
    except PeerError as error:
        return side, str(error)
    return side, ""


def lines_of(title: str, sides: Sequence[Side]) -> Iterator[str]:
    yield title
    yield "| program | precision | ms | packtrain in f32 is so many times as fast | MiB | first loss |"
    yield "|---|---|---|---|---|---|"
    baseline = sides[0]
    for side in sides:
        _, loss, _ = side.turns[0]
        nbytes = side.turns[-1][2]
        times = "" if side is baseline else f"{paired(baseline.seconds, side.seconds):.2f}"
        mib = f"{nbytes / 2**20:,.0f}" if nbytes else "not counted"
        median_ms = 1e3 * statistics.median(side.seconds)
        yield f"| {side.program} | {side.precision} | {median_ms:.2f} | {times} | {mib} | {loss:.4f} |"


def kernels_of(step: Callable[[], float], max_rows: int = 20) -> Iterator[str]:
    """Microseconds of the kernels of one step, those that take most first."""
    torch = kernels.torch()
    for _ in range(WARM):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    sorted_kernels = sorted(
        profile.key_averages(), key=lambda kernel: -kernel.self_device_time_total
    )
    total = sum(kernel.self_device_time_total for kernel in sorted_kernels)
    yield f"{sum(kernel.count for kernel in sorted_kernels)} kernels and copies, {total:,.0f} us"
    for kernel in sorted_kernels[:max_rows]:
        yield f"{kernel.self_device_time_total:9,.0f} us {kernel.count:5d} x {kernel.key[:90]}"


def sides_of(device: str, preset: str, base: Path | None) -> list[Side]:
    """Those that the device has: in other precisions than f32 only on `cuda`."""
    names = [
        program_precision
        for program_precision in SIDES
        if program_precision[1] == "f32" or device.startswith("cuda")
    ]
    args = device, preset, base
    return [
        Side(
            *program_precision,
            PeerProcess("benchmarks.gpu", "taking_turns", *args, *program_precision),
        )
        for program_precision in names
    ]


def check_base(base: Path | None) -> None:
    """Raise InputError for a base that the peer has no model of."""
    if base is not None and (kind := open_model(base).config.architecture) != "llama":
        raise InputError(f"--base: {base} is of {kind}; the peer here is a llama")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--preset", default="15m", choices=[*training.ROWS])
    parser.add_argument("--base", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--precision", default="f32", choices=PRECISIONS)
    args = parser.parse_args()
    try:
        if args.device.partition(":")[0] not in ("cuda", "mps", "torch"):
            raise InputError(f"--device {args.device}: it must be cuda, mps or torch:cpu")
        target(args.device)
        check_base(args.base)
        if args.kernels:
            step = ours(args.device, args.preset, args.base, args.precision)
            print(*kernels_of(step), sep="\n")
            return 0
        workload = args.preset if args.base is None else f"LoRA on {args.base.name}"
        sides = sides_of(args.device, args.preset, args.base)
        is_alike = compare_sides(f"a step of {workload} on {args.device}", sides, args.rounds)
    except InputError as error:
        print(f"benchmarks.gpu: {error}; nothing was measured", file=sys.stderr)
        return 1
    return 0 if is_alike else 1


if __name__ == "__main__":
    sys.exit(main())
