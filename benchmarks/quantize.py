"""Packed weights beside those of llama-quantize: errors, on a model and on normal values of the same shapes, and time.

    python -m benchmarks.quantize MODEL.gguf [--llama-quantize PATH]
    python -m benchmarks.quantize --times --llama-quantize PATH [MODEL.gguf] [--types Q8_0 Q4_K_M …]

--times runs whole commands by turns, with as many threads, and prints medians of seconds. Without a model it makes one
of the 110m preset with random weights, 440 MB of F32.

MODEL.gguf is in F32 with rows of whole blocks of 256. An error is the sum of squared differences over the sum of
squares, of all matrices together. Speed counts the f32 that goes in.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.llama import write_random_preset
from packtrain import kernels
from packtrain.dtypes import Dtype
from packtrain.gguf import GGUF, write_gguf
from packtrain.kernels.quantized_arrays import dequantize, quantize
from packtrain.models.quant_recipe import MIXES, is_quantizable

ROUNDS = 3


def matrices(gguf: GGUF) -> list[str]:
    return [name for name, entry in gguf.entries.items() if is_quantizable(name, entry.shape)]


def write_normal(source: GGUF, path: Path) -> None:
    """The same file with normal values for matrices."""
    rng = np.random.default_rng(0)
    tensors = {name: source.array(name) for name in source.entries}
    for name in matrices(source):
        shape = source.entries[name].shape
        tensors[name] = 0.02 * rng.standard_normal(shape, np.float32)
    write_gguf(path, source.values, tensors)


def error(source: GGUF, packed: dict[str, np.ndarray]) -> float:
    wrong = total = 0.0
    for name, array in packed.items():
        x = source.array(name)
        wrong += np.square(dequantize(array) - x, dtype=np.float64).sum()
        total += np.square(x, dtype=np.float64).sum()
    return wrong / total


def ours(source: GGUF, dtype: Dtype) -> tuple[float, float]:
    """Error, and bytes per second, the median."""
    values = {name: source.array(name) for name in matrices(source)}
    seconds = []
    for _ in range(ROUNDS):
        start_time = time.perf_counter()
        packed = {name: quantize(x, dtype) for name, x in values.items()}
        seconds.append(time.perf_counter() - start_time)
    return error(source, packed), sum(x.nbytes for x in values.values()) / sorted(seconds)[
        ROUNDS // 2
    ]


def theirs(source: GGUF, program: str, mix: str, output: Path) -> float:
    command = [program, "--pure", str(source.path), str(output), mix]
    subprocess.run(command, check=True, capture_output=True)
    quantized = GGUF(output)
    return error(source, {name: quantized.array(name) for name in matrices(source)})


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
    parser.add_argument("--llama-quantize", metavar="PATH")
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--types", nargs="+", default=[name for name in MIXES if name != "F32"])
    options = parser.parse_args()
    if options.times:
        if options.llama_quantize is None:
            parser.error("--times: needs --llama-quantize, to compare with")
        kernels.prepare(kernels.QUANTIZE_KERNELS)
        with tempfile.TemporaryDirectory() as folder:
            model = options.model or write_random_preset(Path(folder), "F32")
            compare_times(options.llama_quantize, model, options.types, Path(folder))
    else:
        compare_errors(options)


def compare_errors(options: argparse.Namespace) -> None:
    print("values  type        error    of llama-quantize   ratio     MB/s")
    with tempfile.TemporaryDirectory() as folder:
        normal, output = Path(folder) / "normal.gguf", Path(folder) / "made.gguf"
        write_normal(GGUF(options.model), normal)
        for values, path in (("normal", normal), ("model", options.model)):
            source = GGUF(path)
            for mix in {mix.dtype: mix for name, mix in MIXES.items() if name != "F32"}.values():
                our_error, speed = ours(source, mix.dtype)
                peer_cells = f"{'-':>18}  {'-':>6}"
                if options.llama_quantize:
                    peer = theirs(source, options.llama_quantize, mix.name, output)
                    peer_cells = f"{peer:18.6e}  {our_error / peer:6.4f}"
                print(
                    f"{values:7} {mix.dtype!s:7} {our_error:12.6e} {peer_cells} {speed / 1e6:8.0f}"
                )


if __name__ == "__main__":
    main()
