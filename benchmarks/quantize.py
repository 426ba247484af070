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

from benchmarks.llama import made
from packtrain import kernels
from packtrain.dtypes import Dtype
from packtrain.gguf import GGUF, write
from packtrain.kernels.quantized_arrays import dequantize, quantize
from packtrain.models.quant_recipe import MIXES, quantizable

ROUNDS = 3


def matrices(gguf: GGUF) -> list[str]:
    return [name for name, entry in gguf.entries.items() if quantizable(name, entry.shape)]


def write_normal(given: GGUF, path: Path) -> None:
    """The same file with normal values for matrices."""
    rng = np.random.default_rng(0)
    tensors = {name: given.array(name) for name in given.entries}
    for name in matrices(given):
        shape = given.entries[name].shape
        tensors[name] = 0.02 * rng.standard_normal(shape, np.float32)
    write(path, given.values, tensors)


def error(given: GGUF, packed: dict[str, np.ndarray]) -> float:
    wrong = total = 0.0
    for name, array in packed.items():
        x = given.array(name)
        wrong += np.square(dequantize(array) - x, dtype=np.float64).sum()
        total += np.square(x, dtype=np.float64).sum()
    return wrong / total


def ours(given: GGUF, dtype: Dtype) -> tuple[float, float]:
    """Error, and bytes per second, the median."""
    values = {name: given.array(name) for name in matrices(given)}
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        packed = {name: quantize(x, dtype) for name, x in values.items()}
        seconds.append(time.perf_counter() - began)
    return error(given, packed), sum(x.nbytes for x in values.values()) / sorted(seconds)[
        ROUNDS // 2
    ]


def theirs(given: GGUF, program: str, mix: str, made: Path) -> float:
    command = [program, "--pure", str(given.path), str(made), mix]
    subprocess.run(command, check=True, capture_output=True)
    found = GGUF(made)
    return error(given, {name: found.array(name) for name in matrices(given)})


def seconds(command: list[str]) -> float:
    # Python keeps compiled modules unless it is told not to, which would count their compiling in each command
    usual = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=usual)
    return time.perf_counter() - began


def compare_times(program: str, model: Path, types: list[str], folder: Path) -> None:
    threads, made = str(kernels.threads()), str(folder / "made.gguf")
    print(f"{threads} threads\ntype      packtrain  llama-quantize  ratio")
    for name in types:
        command = ["-m", "packtrain", "quantize", str(model), made, name, "--overwrite"]
        try:
            rounds = [
                (
                    seconds([program, str(model), made, name, threads]),
                    seconds([sys.executable, *command]),
                )
                for _ in range(ROUNDS)
            ]
        except subprocess.CalledProcessError:  # some types need an importance matrix
            print(f"{name:8} refused")
            continue
        other, own = (statistics.median(side) for side in zip(*rounds, strict=True))
        print(f"{name:8} {own:10.2f} {other:15.2f} {other / own:6.2f}", flush=True)


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
        kernels.prepare(kernels.PACKING)
        with tempfile.TemporaryDirectory() as folder:
            model = options.model or made(Path(folder), "F32")
            compare_times(options.llama_quantize, model, options.types, Path(folder))
    else:
        compare_errors(options)


def compare_errors(options: argparse.Namespace) -> None:
    print("values  type        error    of llama-quantize   ratio     MB/s")
    with tempfile.TemporaryDirectory() as folder:
        normal, made = Path(folder) / "normal.gguf", Path(folder) / "made.gguf"
        write_normal(GGUF(options.model), normal)
        for values, path in (("normal", normal), ("model", options.model)):
            given = GGUF(path)
            for mix in {mix.dtype: mix for name, mix in MIXES.items() if name != "F32"}.values():
                found, speed = ours(given, mix.dtype)
                other = f"{'-':>18}  {'-':>6}"
                if options.llama_quantize:
                    peer = theirs(given, options.llama_quantize, mix.name, made)
                    other = f"{peer:18.6e}  {found / peer:6.4f}"
                print(f"{values:7} {mix.dtype!s:7} {found:12.6e} {other} {speed / 1e6:8.0f}")


if __name__ == "__main__":
    main()
