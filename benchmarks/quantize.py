"""`packtrain quantize` beside llama-quantize: seconds of whole commands, by turns, with as many threads; medians.

    python -m benchmarks.quantize --llama-quantize PATH [MODEL.gguf] [--types Q8_0 Q4_K_M …]

Without a model it makes one of the 110m preset with random weights, 440 MB of F32. The bits are compared in the tests.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.llama import write_random_preset
from packtrain import kernels
from packtrain.models.quant_recipe import MIXES

ROUNDS = 3


def seconds(command: list[str]) -> float:
    # Python keeps compiled modules unless it is told not to, which would count their compiling in each command
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
    start_time = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return time.perf_counter() - start_time


def compare_times(program: str, model: Path, types: list[str], folder: Path) -> None:
    threads, output = str(kernels.threads()), str(folder / "made.gguf")
    print(f"{threads} threads\ntype      packtrain  llama-quantize  ratio")
    for name in types:
        command = ["-m", "packtrain", "quantize", str(model), output, name, "--overwrite"]
        try:
            rounds = [
                (
                    seconds([program, str(model), output, name, threads]),
                    seconds([sys.executable, *command]),
                )
                for _ in range(ROUNDS)
            ]
        except subprocess.CalledProcessError:  # some types need an importance matrix
            print(f"{name:8} refused")
            continue
        their_seconds, our_seconds = (statistics.median(side) for side in zip(*rounds, strict=True))
        print(
            f"{name:8} {our_seconds:10.2f} {their_seconds:15.2f} {their_seconds / our_seconds:6.2f}",
            flush=True,
        )


def main() -> None:
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--llama-quantize", metavar="PATH", required=True)
    parser.add_argument("--types", nargs="+", default=[name for name in MIXES if name != "F32"])
    options = parser.parse_args()
    kernels.prepare(kernels.QUANTIZE_KERNELS)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or write_random_preset(Path(folder), "F32")
        compare_times(options.llama_quantize, model, options.types, Path(folder))


if __name__ == "__main__":
    main()
