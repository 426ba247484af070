"""Loss curves with moments in 8 bits beside f32: python -m benchmarks.moments_8bit [--base MODEL.gguf --data FILE]

Trains preset `1m` on a text, or LoRA on a base, with AdamW and Muon in f32 and in 8 bits, by several seeds, which begin
with the same weights and see the same batches. Printed are validation losses by seed, and the mean difference of each
pair with its standard error beside the spread of f32's losses over seeds, the noise that it would have to exceed.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import packtrain as pt

TEXT = Path(__file__).parents[2] / "shared/data/text/tinyshakespeare.txt"
PAIRS = {"adamw": "adamw8bit", "muon": "muon8bit"}


def final_loss(args: argparse.Namespace, folder: Path, optimizer: str, seed: int) -> float:
    """Return the validation loss after the last step of one run."""
    common_options = {
        "output": folder / "model.gguf", "overwrite": True, "seed": seed, "iters": args.iters, "optimizer": optimizer,
        "steps_per_eval": 0, "val_batches": args.val_batches, "tensorboard": False,
    }  # fmt: skip
    if args.base is None:
        progress = pt.train(args.data, preset="1m", **common_options).progress
    else:
        progress = pt.finetune(
            args.base, args.data, merge="none", replay=0, **common_options
        ).progress
    assert progress.last is not None
    return float(progress.last)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--base", type=Path, help="tune this model (default: train 1m)")
    parser.add_argument("--data", type=Path, default=TEXT)
    parser.add_argument("--iters", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--val-batches", type=int, default=50)
    parser.add_argument("--optimizers", default=",".join(PAIRS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for optimizer in args.optimizers.split(","):
            losses = {
                name: [final_loss(args, Path(folder), name, seed) for seed in range(args.seeds)]
                for name in (optimizer, PAIRS[optimizer])
            }
            for name, by_seed in losses.items():
                print(f"{name:10} {'  '.join(f'{loss:.4f}' for loss in by_seed)}", flush=True)
            differences = [
                b - a for a, b in zip(losses[optimizer], losses[PAIRS[optimizer]], strict=True)
            ]
            error = statistics.stdev(differences) / len(differences) ** 0.5
            spread = statistics.stdev(losses[optimizer])
            mean = statistics.fmean(differences)
            print(f"{'':10} {mean:+.4f} ± {error:.4f}; f32 spreads by {spread:.4f}", flush=True)


if __name__ == "__main__":
    main()
