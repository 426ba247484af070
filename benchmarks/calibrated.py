"""What quantizing with data keeps: plain, llama-quantize with an importance matrix, and --calibrate, at the same bytes.

    python -m benchmarks.calibrated MODEL.gguf --data TEXT --held TEXT --llama-quantize PATH [--python PYTHON]

MODEL is F32 or F16. Importance matrix and --calibrate read the same tokens of the same text; perplexity is of another
one, in windows of 512 tokens, as llama-perplexity measures it; differences of loss are of the same tokens, with their
standard errors. With --python, that of a virtual environment with llama-cpp-python, llama.cpp computes the calibrated
file, too: once as it is, to see that it can, and once unpacked to F32, whose logits are compared with those of here.
"""

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

import packtrain as pt
from benchmarks.beside import logits, logprob_error, peer_logprobs, run_silently
from benchmarks.watched import run_packtrain
from packtrain.gguf import GGUF
from packtrain.models.model_file import open_model
from packtrain.training.model_loss import MeanEstimate

TYPES = ("Q4_K_M", "Q3_K_M", "Q2_K")
UNWEIGHED = (
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ1_S",
    "IQ1_M",
)  # have matrices that are written with data only
TOKENS = 16  # compared with llama.cpp


def theirs(program: str, weights: Path, model: Path, to: Path, mix: str) -> None:
    """What llama-quantize writes with this importance matrix."""
    command = [program, "--imatrix", str(weights), str(model), str(to), mix]
    subprocess.run(command, check=True, capture_output=True)


def ours(model: Path, to: Path, mix: str, *flags: object) -> float:
    """What packtrain writes; returns the seconds it took."""
    done = run_packtrain("quantize", model, to, mix, *flags, "--overwrite")
    if done.code:
        raise SystemExit(done.said)
    return done.seconds


def row(args: argparse.Namespace, weights: Path, folder: Path, mix: str, base: np.ndarray) -> str:
    """A row of the table."""
    files = {name: folder / f"{name}.gguf" for name in ("plain", "weighed", "with")}
    if mix in UNWEIGHED:
        del files["plain"]
    else:
        ours(args.model, files["plain"], mix)
    theirs(args.llama_quantize, weights, args.model, files["weighed"], mix)
    seconds = ours(args.model, files["with"], mix, "--calibrate", args.data)
    losses = {name: heldout_losses(args, path) for name, path in files.items()}
    cells = [
        f"{np.exp(loss.mean()):.3f} ({np.exp(loss.mean() - base.mean()) - 1:+.1%})"
        for loss in losses.values()
    ]
    loss_change = MeanEstimate.of(losses["with"] - losses["weighed"])
    # of tensors: llama-quantize writes more metadata
    nbytes = [sum(e.nbytes for e in GGUF(path).entries.values()) for path in files.values()]
    assert len(set(nbytes)) == 1, nbytes
    peer_difference = compared(args, files["with"], folder) if args.python else "-"
    cells = ["-"] * (3 - len(cells)) + cells
    change = f"{loss_change.value:+.4f} ± {loss_change.error:.4f}"
    return f"| {mix} | {nbytes[0]:,} | {' | '.join(cells)} | {change} | {seconds:.0f} | {peer_difference} |"


def heldout_losses(args: argparse.Namespace, path: Path) -> np.ndarray:
    """Losses of the held-out text's tokens."""
    evaluation = pt.evaluate([path], args.held, separator="")
    return next(iter(evaluation.losses.values()))


def compared(args: argparse.Namespace, path: Path, folder: Path) -> str:
    """How far llama.cpp's logarithms of probabilities are off; it must also load the file as it is."""
    model, unpacked = open_model(path), folder / "unpacked.gguf"
    tokens = model.tokenizer().encode(args.held.read_text()[:400])[:TOKENS]
    our_logits = logits(model, tokens)
    packed_difference = logprob_error(
        our_logits, peer_logprobs(args.python, tokens, {"model": str(path)})
    )
    run_silently("quantize", path, unpacked, "F32", "--allow-requantize", "--overwrite")
    unpacked_difference = logprob_error(
        our_logits, peer_logprobs(args.python, tokens, {"model": str(unpacked)})
    )
    return f"{unpacked_difference:.1e} ({packed_difference:.1e} as packed)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--held", type=Path, required=True)
    parser.add_argument("--llama-quantize", required=True)
    parser.add_argument("--python")
    parser.add_argument("--types", nargs="+", default=TYPES)
    args = parser.parse_args()
    base = heldout_losses(args, args.model)
    print(f"{args.model.name}: perplexity {np.exp(base.mean()):.3f} on {len(base):,} tokens")
    with tempfile.TemporaryDirectory() as name:
        folder, start_time = Path(name), time.monotonic()
        weights = folder / "imatrix.gguf"
        run_silently("imatrix", args.model, "--data", args.data, "-o", weights, "--tokens", 1 << 14)
        print(f"importance matrix: {time.monotonic() - start_time:.0f} s")
        if args.python:
            print(
                f"llama.cpp and packtrain on the model itself: {compared(args, args.model, folder)}"
            )
        print(
            "| type | bytes | plain | llama-quantize --imatrix | --calibrate | change of loss | s | llama.cpp |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for mix in args.types:
            print(row(args, weights, folder, mix, base), flush=True)


if __name__ == "__main__":
    main()
