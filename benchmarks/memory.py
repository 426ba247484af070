"""Private memory of training, seen from outside, against the plan: python -m benchmarks.memory [--presets 1m 15m]

Another process samples a run of a few steps with validation, a sample and a checkpoint. Its baseline is the first
sample after the plan is there, just before the arena is reserved; its peak less that is compared with the plan.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from packtrain.common.memory import private_nbytes_of

MIB = 2**20


def text(count: int) -> str:
    """Enough different words for a vocabulary of 32,000."""
    rng = random.Random(0)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(60_000)]
    return " ".join(words[min(int(rng.paretovariate(0.6)), len(words) - 1)] for _ in range(count))


def run(preset: str, data: Path, folder: Path) -> tuple[int, int, int]:
    """Bytes: the baseline, the peak over it, and what the plan says the peak over it is."""
    output = folder / f"{preset}.gguf"
    flags = ["--preset", preset, "--iters", "6", "--batch-size", "4", "--steps-per-eval", "3"]
    size_flags = [
        "--save-every",
        "3",
        "--sample-every",
        "3",
        "--val-batches",
        "2",
        "--sample-prompt",
        "ba",
    ]
    command = [sys.executable, "-m", "packtrain", "train", "--data", str(data), "-o", str(output)]
    process = subprocess.Popen(
        [*command, *flags, *size_flags, "--overwrite"], stderr=subprocess.PIPE, text=True
    )
    plan, baseline, peak = output.with_suffix(".run") / "plan.json", 0, 0
    while process.poll() is None:
        current_nbytes = private_nbytes_of(process.pid)
        if not baseline and plan.exists():
            baseline = current_nbytes
        peak = max(peak, current_nbytes if baseline else 0)
        time.sleep(0.002)
    if process.returncode:
        assert process.stderr is not None
        raise SystemExit(process.stderr.read())
    said = json.loads(plan.read_text())
    return baseline, peak - baseline, said["total_bytes"] - said["baseline_bytes"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--presets", nargs="+", default=["1m", "15m"])
    args = parser.parse_args()
    print(f"{'preset':>8} {'baseline':>10} {'planned':>10} {'measured':>10} {'difference':>18}")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "text.txt"
        data.write_text(text(1_500_000))
        for preset in args.presets:
            baseline, measured, planned = run(preset, data, Path(folder))
            difference = measured - planned
            print(
                f"{preset:>8} {baseline / MIB:>6.1f} MiB {planned / MIB:>6.1f} MiB {measured / MIB:>6.1f} MiB "
                f"{difference / MIB:>+7.1f} MiB, {difference / planned:+.1%}"
            )


if __name__ == "__main__":
    main()
