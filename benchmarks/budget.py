"""Random budgets through `packtrain plan` and `packtrain train`, under a cap: python -m benchmarks.budget

    python -m benchmarks.budget [--plans 200] [--runs 60] [--seed 0] [--first 0]
    python -m benchmarks.budget --pressure 300 [--seed 0]: commands on long rows and odd files, and hostile requests

Each case is a random shape, batch, optimizer and budget. Its plan must fit or be refused with a smallest budget; that
budget must be taken, and 3 % less refused. Runs make steps with the longest batches there are, evaluations, samples and
saves, watched from outside with their children from beginning to end, with RLIMIT_DATA as a cap of the system: no kill,
and a peak within the budget. That limit counts what is reserved and not touched too, such as stacks of threads and what
planning has given back to the heap: how much that is, a run of the deepest shape without a cap tells. The text is
tokenized before.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.memory import text
from benchmarks.pressure import run_cases
from benchmarks.watched import private_nbytes_of
from packtrain.common.memory import parse_size

MIB = 1 << 20
MINIMUM = re.compile(r"smallest --memory that would do is (?:about )?(\d+)MiB")
READING = re.compile(r"reading the data needs at least (\w+)")
COUNTED = re.compile(r"^(VmData|RssAnon|RssShmem):\s+(\d+) kB$", re.MULTILINE)
MAX_WORK = 3e10  # tokens of a step times parameters of all blocks
# by which what is reserved differs from run to run: the larger the plan, the more heap it leaves
SPARE_NBYTES = 24 * MIB
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}  # each further one reserves 64 MiB, or does not, by chance
DEEPEST = "--dim 128 --layers 24 --heads 4 --kv-heads 2 --ffn 256 --ctx 64 --batch-size 4 --vocab-size 1000"
OFTEN = "--iters 6 --steps-per-eval 2 --val-batches 2 --save-every 2 --no-tensorboard --overwrite"


class FailureList(list[str]):
    """What went wrong, said when it does."""

    def append(self, text: str) -> None:
        print(f"\n{text}")
        super().append(text)


def random_flags(rng: random.Random) -> list[str]:
    """Flags of a random run whose steps take a second or two."""
    while True:
        heads = rng.choice((2, 4, 8))
        flags = {
            "dim": heads * rng.choice((16, 32, 64)),
            "layers": rng.choice((1, 2, 3, 4, 6, 8, 10, 16, 24)),
            "heads": heads,
            "kv-heads": rng.choice([k for k in (1, 2, 4, 8) if heads % k == 0]),
            "ffn": 16 * rng.randint(2, 96),
            "ctx": rng.choice((48, 128, 256, 512)),
            "batch-size": rng.randint(1, 16),
            "grad-accumulation-steps": rng.choice((1, 1, 2)),
            "max-grad-norm": rng.choice((0, 1)),
            "optimizer": rng.choice(("adamw", "sgd")),
            "vocab-size": rng.choice((320, 1_000, 3_000)),
            "sample-every": rng.choice((0, 0, 3)),
            "patience": rng.choice((0, 2)),
            "type": rng.choice(("f32", "f16")),
        }
        size = {name: value for name, value in flags.items() if isinstance(value, int)}
        block = size["dim"] * (3 * size["dim"] + 3 * size["ffn"])
        tokens = size["ctx"] * size["batch-size"] * size["grad-accumulation-steps"]
        if MAX_WORK / 20 < tokens * size["layers"] * block < MAX_WORK:
            fill_flags = ["--no-fill-samples"] if rng.random() < 0.2 else []
            return [
                part for name, value in flags.items() for part in (f"--{name}", str(value))
            ] + fill_flags


def plan_run(base: list[str], memory: str | None) -> tuple[int, str, dict[str, int]]:
    """Exit code, standard error, and the plan as JSON."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        memory_flags = [] if memory is None else ["--memory", memory]
        command = [
            sys.executable,
            "-m",
            "packtrain",
            "plan",
            *base,
            "--json",
            file.name,
            *memory_flags,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        text = Path(file.name).read_text()
        return done.returncode, done.stderr, json.loads(text) if text else {}


class ObservedRun(NamedTuple):
    """A run from outside: exit code, what it said, most bytes with its children and alone, and as the system counts."""

    code: int
    said: str
    peak: int
    own_nbytes: int
    data: int


def run_capped(base: list[str], output: Path, memory: str, cap: int | None) -> ObservedRun:
    """A run under a cap."""
    command = [sys.executable, "-m", "packtrain", *base, *OFTEN.split(), "-o", str(output)]
    if cap is not None:
        command = ["prlimit", f"--data={cap}", *command]
    command += ["--memory", memory]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        env=os.environ | ONE_ARENA,
    )  # fmt: skip
    peaks = [0, 0, 0]
    while process.poll() is None:
        now = private_nbytes_of(process.pid), *process_nbytes(process.pid)
        peaks = [max(pair) for pair in zip(peaks, now, strict=True)]
        time.sleep(0.002)
    assert process.stderr is not None
    return ObservedRun(process.returncode, process.stderr.read(), *peaks)


def process_nbytes(pid: int) -> tuple[int, int]:
    """Private bytes of a process, and what the system counts as its data."""
    try:
        fields = dict(COUNTED.findall(Path(f"/proc/{pid}/status").read_text()))
    except OSError:
        return 0, 0
    data, anon, shmem = (
        1024 * int(fields.get(name, 0)) for name in ("VmData", "RssAnon", "RssShmem")
    )
    return anon + shmem, data


def overhead(base: list[str], folder: Path) -> int:
    """What a run of the deepest shape reserves and does not touch; the cap made with it is seen to bite."""
    base, memory = [*base, *DEEPEST.split()], "1GiB"
    plan_run(base, memory)  # tokenizes the text
    measured = run_capped(base, folder / "plain.gguf", memory, None)
    assert measured.code == 0, measured.said
    capped = run_capped(base, folder / "capped.gguf", memory, measured.data - 16 * MIB)
    assert capped.code != 0, "a cap below what a run takes did not stop it"
    return measured.data - measured.own_nbytes + SPARE_NBYTES


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="leave out the cases before this one")
    parser.add_argument(
        "--pressure", type=int, default=0, help="so many cases of pressure.py instead"
    )
    args = parser.parse_args()
    if args.pressure:
        with tempfile.TemporaryDirectory() as folder:
            faults = run_cases(
                args.pressure, args.seed, Path(folder), lambda line: print(line, flush=True)
            )
        sys.exit(f"{faults} of {args.pressure} were wrong" if faults else 0)
    rng, wrong, used, refused, num_run = random.Random(args.seed), FailureList(), [], 0, 0
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "text.txt"
        data.write_text(text(120_000))
        train_flags = ["train", "--data", str(data)]
        untouched_nbytes = overhead(train_flags, Path(folder))
        print(
            f"runs reserve {untouched_nbytes / MIB:.0f} MiB that they do not touch; the cap is the budget and this"
        )
        for number in range(args.plans):
            base = [*train_flags, *random_flags(rng)]
            share = rng.uniform(0.2, 1.1)
            if number < args.first:
                continue
            _, _, unlimited = plan_run(base, None)
            nbytes = unlimited["baseline_bytes"] + int(
                share * (unlimited["total_bytes"] - unlimited["baseline_bytes"])
            )
            memory = f"{nbytes // 1024}KiB"
            code, said, _ = plan_run(base, memory)
            minimum = MINIMUM.search(said)
            if code == 3 and minimum:
                refused += 1
                memory = f"{minimum[1]}MiB"
                if plan_run(base, memory)[0] != 0:
                    wrong.append(f"case {number}: the smallest budget {memory} is refused: {base}")
                if plan_run(base, f"{int(minimum[1]) * 993}KiB")[0] != 3:
                    wrong.append(f"case {number}: 3 % less than {memory} is taken: {base}")
            elif code != 0:
                wrong.append(f"case {number}: exit {code}: {said}")
            if num_run < args.runs:
                num_run += 1
                limit = parse_size(memory, "--memory")
                output = Path(folder) / f"m{number}.gguf"
                measured = run_capped(base, output, memory, limit + untouched_nbytes)
                used.append(measured.peak / limit)
                if measured.code or used[-1] > 1:
                    wrong.append(
                        f"case {number}: exit {measured.code}, peak {used[-1]:.1%} of {memory}: {measured.said[-300:]}"
                    )
            print(
                f"\r{number + 1} planned, {refused} refused, {num_run} run, {len(wrong)} wrong",
                end="",
                flush=True,
            )
    print(
        f"\npeaks of runs: median {statistics.median(used):.1%}, most {max(used):.1%} of their budgets"
    )
    print(f"{len(wrong)} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
