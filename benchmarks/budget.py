"""Random budgets through `packtrain plan` and `packtrain train`, under a cap: python -m benchmarks.budget

    python -m benchmarks.budget [--plans 200] [--runs 60] [--seed 0]

Each case is a random shape, batch, optimizer and budget. Its plan must fit or be refused with a smallest budget; that
budget must be taken, and 3 % less refused. Runs make steps with the longest batches there are, an evaluation and a
save, watched from outside, with RLIMIT_DATA as a cap of the system: no kill, and a peak within the budget.
"""

import argparse
import json
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from packtrain.memory import parse_size, private_nbytes_of
from tests.kill import words

MIB = 1 << 20
MINIMUM = re.compile(r"smallest --memory that would do is (\d+)MiB")
# what the system counts as data and this project does not: reserved and never touched, such as stacks of threads
RESERVED = 512 * MIB


class Wrong(list[str]):
    """What went wrong, said when it does."""

    def append(self, text: str) -> None:
        print(f"\n{text}")
        super().append(text)


def case(rng: random.Random) -> list[str]:
    """Flags of a random run."""
    heads = rng.choice((2, 4, 8))
    flags = {
        "dim": heads * rng.choice((8, 16, 32, 64)),
        "layers": rng.randint(1, 10),
        "heads": heads,
        "kv-heads": rng.choice([k for k in (1, 2, 4, 8) if heads % k == 0]),
        "ffn": 16 * rng.randint(2, 48),
        "ctx": rng.choice((16, 48, 128, 256)),
        "batch-size": rng.randint(1, 12),
        "grad-accumulation-steps": rng.choice((1, 1, 2)),
        "max-grad-norm": rng.choice((0, 1)),
        "optimizer": rng.choice(("adamw", "sgd")),
        "vocab-size": 320,
    }
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))]


def planned(base: list[str], memory: str | None) -> tuple[int, str, dict[str, int]]:
    """Exit code, what was said, and the plan as JSON."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        more = [] if memory is None else ["--memory", memory]
        command = [sys.executable, "-m", "packtrain", "plan", *base, "--json", file.name, *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        text = Path(file.name).read_text()
        return done.returncode, done.stderr, json.loads(text) if text else {}


def cap(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def trained(base: list[str], output: Path, memory: str) -> tuple[int, int, str]:
    """Exit code of a run under a cap, its peak from outside, and what it said."""
    limit = parse_size(memory, "--memory")
    often = [
        "--iters",
        "4",
        "--steps-per-eval",
        "2",
        "--save-every",
        "2",
        "--no-tensorboard",
        "--overwrite",
    ]
    command = [
        sys.executable,
        "-m",
        "packtrain",
        *base,
        *often,
        "-o",
        str(output),
        "--memory",
        memory,
    ]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, preexec_fn=lambda: cap(limit + RESERVED)
    )
    plan, peak = output.with_suffix(".run") / "plan.html", 0
    while process.poll() is None:
        seen = private_nbytes_of(process.pid)
        peak = max(peak, seen if plan.exists() else 0)
        time.sleep(0.002)
    assert process.stderr is not None
    return process.returncode, peak, process.stderr.read()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng, wrong, used, refused, ran = random.Random(given.seed), Wrong(), [], 0, 0
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "text.txt"
        data.write_text(words(60_000))
        for number in range(given.plans):
            base = ["train", "--data", str(data), *case(rng)]
            _, _, whole = planned(base, None)
            share = rng.uniform(0.0, 1.1)
            nbytes = whole["baseline_bytes"] + int(
                share * (whole["total_bytes"] - whole["baseline_bytes"])
            )
            memory = f"{nbytes // 1024}KiB"
            code, said, _ = planned(base, memory)
            found = MINIMUM.search(said)
            if code == 3 and found:
                refused += 1
                memory = f"{found[1]}MiB"
                if planned(base, memory)[0] != 0:
                    wrong.append(f"case {number}: the smallest budget {memory} is refused: {base}")
                if planned(base, f"{int(found[1]) * 993}KiB")[0] != 3:
                    wrong.append(f"case {number}: 3 % less than {memory} is taken: {base}")
            elif code != 0:
                wrong.append(f"case {number}: exit {code}: {said}")
            if ran < given.runs:
                ran += 1
                code, peak, said = trained(base, Path(folder) / f"m{number}.gguf", memory)
                used.append(peak / parse_size(memory, "--memory"))
                if code or used[-1] > 1:
                    wrong.append(
                        f"case {number}: exit {code}, peak {used[-1]:.1%} of {memory}: {said[-300:]}"
                    )
            print(
                f"\r{number + 1} planned, {refused} refused, {ran} run, {len(wrong)} wrong",
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
