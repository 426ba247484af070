"""Predicted against measured time of a step: python -m benchmarks.times [CASE …] [--base FILE --conversations FILE]

A case is `1m`, `15m`, `110m` or `base`, perhaps with `:train`, `:lora` or `:full`. Each runs some steps of the command,
and prints what the plan expected, the median of what all steps but the first took, and their ratio.
Only a quiet machine means anything; `--measure-speed` measures its rates first.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from packtrain.training.monitoring import metrics_file

SHARED = Path(__file__).parents[2] / "shared/data"
VOCABULARY = SHARED / "tokenizers/ggml-vocab/ggml-vocab-llama-spm.gguf"
TEXT = SHARED / "text/tinystories_sample.txt"
ROWS = {"1m": 8, "15m": 4, "110m": 1, "base": 4}  # of a batch
STEPS = {"1m": 21, "15m": 6, "110m": 5, "base": 3}
MODES = {"train": [], "lora": [], "full": ["--full"]}


def packtrain(*arguments: object) -> None:
    command = [sys.executable, "-m", "packtrain", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")


def times(output: Path) -> tuple[float, float]:
    """Seconds of a step: as planned, and the median of all steps but the first."""
    folder = output.with_suffix(".run")
    records = metrics_file.read(folder / "metrics.jsonl")
    end_times = [r["seconds"] for r in records if "loss" in r]
    median_s = statistics.median(b - a for a, b in itertools.pairwise(end_times))
    return json.loads((folder / "plan.json").read_text())["seconds_per_step"], median_s


def cases(case_names: list[str], base: Path | None) -> Iterator[tuple[str, str]]:
    for case in case_names:
        name, _, mode = case.partition(":")
        if name not in ROWS or (mode and mode not in MODES) or case == "base:train":
            raise SystemExit(f"{case}: no such case")
        if name == "base" and base is None:
            raise SystemExit("base: needs --base FILE and --conversations FILE")
        yield from (
            (name, m) for m in MODES if m == mode or not (mode or (name, m) == ("base", "train"))
        )


def run(name: str, mode: str, args: argparse.Namespace, folder: Path) -> tuple[float, float]:
    output, trained = folder / f"{name}-{mode}.gguf", folder / f"{name}-train.gguf"
    common = ["-o", output, "--batch-size", ROWS[name], "--iters", STEPS[name], "--no-tensorboard"]
    common += ["--val-batches", 1, "--overwrite"]
    if name == "base":
        packtrain("finetune", args.base, "--data", args.conversations, *MODES[mode], *common)
        return times(output)
    data = ["--data", args.text, *common]
    if mode == "train":
        vocabulary = [] if name == "1m" else ["--vocab", args.vocab]
        packtrain("train", "--preset", name, *vocabulary, *data)
    else:
        if not trained.exists():
            run(name, "train", args, folder)
        packtrain("finetune", trained, *MODES[mode], *data)
    return times(output)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=["1m", "15m", "110m"])
    parser.add_argument("--base", type=Path)
    parser.add_argument("--conversations", type=Path)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--vocab", type=Path, default=VOCABULARY)
    parser.add_argument(
        "--keep", type=Path, help="a folder for the models, so that another call finds them"
    )
    args = parser.parse_args()
    print(f"{'':12} {'planned s':>10} {'measured s':>10} {'ratio':>6}")
    with tempfile.TemporaryDirectory() as scratch:
        for name, mode in cases(args.cases, args.base):
            planned, measured_s = run(name, mode, args, args.keep or Path(scratch))
            print(
                f"{name + ' ' + mode:12} {planned:10.4f} {measured_s:10.4f} {measured_s / planned:6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
