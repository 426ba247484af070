"""Embeddings beside llama.cpp's: python -m benchmarks.embeddings MODEL.gguf … --llama-python PYTHON

The largest difference of normalized values, by pooling, with keys and values in f32. PYTHON has llama-cpp-python. In
quantized models llama.cpp rounds activations to 8 bits, packtrain does not: `packtrain quantize MODEL F32.gguf F32`
unpacks one.
"""

import argparse

import numpy as np

import packtrain as pt
from benchmarks.beside import ask_peer
from packtrain.inference.embeddings import POOLINGS

TEXTS = [
    "The cat sat on the mat.",
    "Embeddings are vectors.",
    "Once upon a time there was a girl named Lily, who liked to play outside in the sun.",
]


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--llama-python", required=True)
    args = parser.parse_args()
    for model in args.models:
        for number, pooling in enumerate(POOLINGS, 1):
            response = ask_peer(args.llama_python, model=model, embed=TEXTS, pooling=number)
            theirs = np.array(response["vectors"])
            ours = pt.embed(model, TEXTS, pooling=pooling, normalize=False, cache_type="f32")
            off = np.abs(unit(ours) - unit(theirs)).max()
            print(f"{model}: {pooling}: {off:.1e}, unnormalized {np.abs(ours - theirs).max():.1e}")


if __name__ == "__main__":
    main()
