"""Python calls before step 1 of a LoRA run, and of a steady step: python -m benchmarks.calls [--base FILE] [--top N]

Runs `packtrain finetune` until its cache has everything (kernels, rates, tokens, the choice of what to recompute), and
then once with a profile function. Counted are the frames that begin or continue in files of packtrain: functions,
comprehensions, generators, bodies of classes and modules; not functions in C, nor methods that `dataclass` generates,
which belong to no file. "before" is everything from the start of the process to the first step of the training loop,
with the check of gradients and its kernel calls. "step" is a steady turn of the training loop, with batch, metrics and
progress; "engine" is its part inside TrainingEngine.step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SHARED = Path(__file__).parents[2] / "shared/data"
BASE, TEXT = SHARED / "models/stories260K/stories260K.gguf", SHARED / "text/tinyshakespeare.txt"
PACKAGE = str(Path(__file__).parents[1] / "packtrain")
TEXT_NBYTES, STEPS, TIMED_RUNS = 20_000, 8, 3
RESULT_VARIABLE = "BENCHMARK_CALLS_RESULT"
Counts = Counter[CodeType]


class CallCounter:
    """A profile function that counts calls by code, and apart for each step."""

    def __init__(self) -> None:
        self.turns, self.engine_steps = [Counts()], list[Counts]()
        self.seconds_before, self.engine_depth = 0.0, 0
        self.counted_code = dict[CodeType, bool]()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return"):
            return
        is_counted = self.counted_code.get(code)
        if is_counted is None:
            is_counted = self.counted_code[code] = code.co_filename.startswith(f"{PACKAGE}/")
        if not is_counted:
            return
        is_engine_step = code.co_name == "step" and code.co_filename.endswith("training_engine.py")
        if event == "return":
            self.engine_depth -= is_engine_step
            return
        if code.co_name == "_train_step":
            self.turns.append(Counts())
        if is_engine_step and not self.engine_depth:
            self.engine_steps.append(Counts())
        self.engine_depth += is_engine_step
        self.turns[-1][code] += 1
        if self.engine_depth:
            self.engine_steps[-1][code] += 1


def profiled_run() -> None:
    """Run the command line in this process, counting, and write the counts to a file."""
    counter = CallCounter()
    sys.setprofile(counter)
    from packtrain_command import main

    sys.argv[0] = "packtrain"
    main()
    sys.setprofile(None)
    before, *steps = counter.turns
    steady = sorted(
        steps[2:-1], key=lambda c: c.total()
    )  # not the first two, nor the end of the run
    engine = sorted(counter.engine_steps[3:], key=lambda c: c.total())  # the first is the check
    parts = {"before": before, "step": steady[len(steady) // 2], "engine": engine[len(engine) // 2]}
    listed = {
        part: [(c.co_filename.removeprefix(f"{PACKAGE}/"), c.co_qualname, n) for c, n in k.items()]
        for part, k in parts.items()
    }
    Path(os.environ[RESULT_VARIABLE]).write_text(json.dumps(listed))


def keep_rates(folder: Path) -> dict[Path, str]:
    """Return the rates of the first run by file, as those of a quiet machine, which no later run measures again."""
    files = folder.glob("cache/packtrain/rates-*.json")
    rates = {file: json.loads(file.read_text()) | {"quiet": True} for file in files}
    return {file: json.dumps(values) for file, values in rates.items()}


def run(base: Path, folder: Path, rates: dict[Path, str], *, profiled: bool = False) -> float:
    """Run the command once with these rates; return the seconds until its first step is done."""
    for file, text in rates.items():  # a run whose steps took longer than expected has changed them
        file.write_text(text)
    arguments = ["finetune", base, "--data", folder / "text.txt", "-o", folder / "tuned.gguf"]
    arguments += ["--iters", STEPS, "--batch-size", 2, "--overwrite", "--merge", "none"]
    start = ["-m", "benchmarks.calls"] if profiled else ["-m", "packtrain"]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    environment |= {RESULT_VARIABLE: str(folder / "counts.json")} if profiled else {}
    start_time = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *start, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env=environment,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        lines, seconds = list[str](), 0.0
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step 1/"):
                seconds = time.monotonic() - start_time
    if process.returncode:
        raise SystemExit("".join(lines))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--base", type=Path, default=BASE)
    parser.add_argument("--top", type=int, default=0, help="print this many files and functions")
    args = parser.parse_args()
    # not at the top, where the profiled process would import it uncounted
    from packtrain.kernels.runtime.environment import cache_root

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "text.txt").write_bytes(TEXT.read_bytes()[:TEXT_NBYTES])
        (folder / "cache/packtrain").mkdir(parents=True)
        (folder / "cache/packtrain/kernels").symlink_to(cache_root() / "kernels")
        run(args.base, folder, {})
        rates = keep_rates(folder)
        run(args.base, folder, rates)
        seconds = [run(args.base, folder, rates) for _ in range(TIMED_RUNS)]
        run(args.base, folder, rates, profiled=True)
        counts = json.loads((folder / "counts.json").read_text())
    print(f"step 1 done after {statistics.median(seconds):.2f} s")
    for part, rows in counts.items():
        by_file, by_function = Counter[str](), Counter[str]()
        for file, function, n in rows:
            by_file[file] += n
            by_function[f"{file} {function}"] += n
        print(f"{part:<8}{by_file.total():>8,} calls in {len(by_file):>3} files")
        for label, n in (*by_file.most_common(args.top), *by_function.most_common(args.top)):
            print(f"{n:>12,}  {label}")


if __name__ == "__main__":
    profiled_run() if RESULT_VARIABLE in os.environ else main()
