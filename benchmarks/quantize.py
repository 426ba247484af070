"""Errors of packed weights beside those of llama-quantize, on a model and on normal values of the same shapes.

    python -m benchmarks.quantize MODEL.gguf [--llama-quantize PATH]

MODEL.gguf is in F32 with rows of whole blocks of 256. An error is the sum of squared differences over the sum of
squares, of all matrices together. Speed counts the f32 that goes in.
"""

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from packtrain.dtypes import Dtype
from packtrain.gguf import GGUF, write
from packtrain.models.mix import MIXES, quantizable
from packtrain.quant import dequantize, quantize

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-quantize", metavar="PATH")
    options = parser.parse_args()
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
