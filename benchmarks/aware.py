"""What is left of an adapter's gain once it is stored: merged with data, and trained with --aware.

    python -m benchmarks.aware DATA BASE.gguf … [--iters 24] [--flags "--lr 5e-4"]

Each base is tuned twice, with the same flags on the same batches: plainly, merged with data; and with --aware, whose
merge needs none. The gain is that of the plain adapter in f32, on conversations that neither run sees; losses are of
the files written. Seconds of a step are medians.
"""

import argparse
import re
import shlex
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from benchmarks.watched import run_packtrain
from packtrain.training.monitoring import metrics_file

DEFAULT_FLAGS = "--batch-size 4 --ctx 256 --val-split 0.1 --val-batches 0 --steps-per-eval 0 --seed 1 --no-tensorboard"
LOSSES = re.compile(r"validation loss: base ([\d.]+), with the adapter ([\d.]+), merged ([\d.]+)")


def finetune_losses(base: Path, data: Path, output: Path, *flags: str) -> tuple[list[float], float]:
    """Losses of the base, with the adapter, and of the file written; and the median seconds of a step."""
    all_flags = (*DEFAULT_FLAGS.split(), "--overwrite", *flags)
    done = run_packtrain("finetune", base, "--data", data, "-o", output, *all_flags)
    loss_match = LOSSES.search(done.out + done.said)
    if done.code or loss_match is None:
        sys.exit(done.said)
    steps = [
        r for r in metrics_file.read(output.with_suffix(".run") / "metrics.jsonl") if "loss" in r
    ]
    seconds = [0.0, *(r["seconds"] for r in steps)]
    step_seconds = [b - a for a, b in pairwise(seconds)]
    return [*map(float, loss_match.groups())], statistics.median(step_seconds[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("bases", type=Path, nargs="+")
    parser.add_argument("--iters", type=int, default=24)
    parser.add_argument("--flags", default="", help="more flags of both runs")
    args = parser.parse_args()
    extra_flags = ("--iters", str(args.iters), *shlex.split(args.flags))
    print(
        "| base | loss | adapter in f32 | merged with data | kept | aware, as stored | kept | step |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "tuned.gguf"
        for base in args.bases:
            (before, adapter_loss, merged), seconds = finetune_losses(
                base, args.data, output, *extra_flags
            )
            size = output.stat().st_size
            (_, _, aware), slower = finetune_losses(
                base, args.data, output, "--aware", *extra_flags
            )
            gain = before - adapter_loss
            shares = [f"{(before - loss) / gain:.1%}" for loss in (merged, aware)]
            print(
                f"| {base.stem} | {before:.4f} | {adapter_loss:.4f} | {merged:.4f} | {shares[0]} | {aware:.4f}"
                f" | {shares[1]}"
                f" | {slower / seconds:.2f} × |",
                flush=True,
            )
            if output.stat().st_size != size:
                print(f"{output.stat().st_size - size:+} bytes with --aware")


if __name__ == "__main__":
    main()
