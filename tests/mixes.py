"""Small files of many shapes, and which types llama-quantize gives their tensors.

`python -m tests.mixes LLAMA_QUANTIZE` records what that program chooses into tests/goldens/mixes.json.gz.
"""

import gzip
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.conversion.calibration.importance_matrix import ImportanceMatrix, save_importance
from packtrain.dtypes import DTYPES
from packtrain.gguf import GGUF, MetadataValue, write_gguf
from packtrain.models.quant_recipe import MIXES

RECORD = Path(__file__).parent / "goldens" / "mixes.json.gz"
ROWS = 2  # of every matrix: types depend on names, widths and metadata only


@dataclass(frozen=True, slots=True)
class Shape:
    """A model as far as the choice of types looks at it."""

    blocks: int
    width: int = 256
    ffn: int = 256
    architecture: str = "llama"
    heads: int = 8
    kv_heads: int = 4
    experts: int = 0
    tied: bool = True
    fused: bool = False
    reversed: bool = False


SHAPES = {
    "tied": Shape(8),
    "untied": Shape(11, 512, tied=False),
    "last block first": Shape(24, reversed=True),
    "few values serve many": Shape(80, heads=32),
    "as many values as keys": Shape(80, heads=4),
    "qwen2": Shape(80, architecture="qwen2", heads=4),
    "two experts": Shape(10, experts=2, tied=False),
    "eight experts": Shape(9, experts=8),
    "fused": Shape(6, architecture="phi3", fused=True, tied=False),
    "falcon": Shape(33, architecture="falcon", heads=8, kv_heads=1, fused=True),
    "falcon untied": Shape(16, architecture="falcon", fused=True, tied=False),
    "rows of 96": Shape(4, 96, 512),
    "rows of 96, untied": Shape(4, 256, 96, tied=False),
    "rows of 40": Shape(4, 40),
}
# further options, by the name they have in the record: flags, and arguments of types_of
OPTIONS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "": ([], {}),
    " pure": (["--pure"], {"pure": True}),
    " output q8_0": (["--output-tensor-type", "q8_0"], {"output": DTYPES["q8_0"]}),
    " embedding q5_K": (["--token-embedding-type", "q5_K"], {"embedding": DTYPES["q5_K"]}),
    " weighed": (["--imatrix", "WEIGHTS"], {"weighed": True}),
}
WITH_OPTIONS = ("tied", "untied")  # the shapes for which all of them are recorded
# mixes that are recorded with an importance matrix only
DEMANDING = ("IQ3_XXS", "IQ3_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ1_S", "IQ1_M")


def cases() -> Iterator[tuple[str, str, str]]:
    """Shape, mix and options."""
    for shape in SHAPES:
        for mix in dict.fromkeys(mix.name for mix in MIXES.values()):
            for options in OPTIONS if shape in WITH_OPTIONS else [""]:
                if mix not in DEMANDING or options not in (" pure", " weighed"):
                    yield shape, mix, options


def quantize_options(mix: str, options: str) -> tuple[list[str], dict[str, Any]]:
    """Flags for llama-quantize, and arguments of types_of."""
    flags, arguments = OPTIONS[options]
    if mix in DEMANDING:
        flags, arguments = flags + OPTIONS[" weighed"][0], arguments | OPTIONS[" weighed"][1]
    return flags, arguments


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and sizes, in the order of the file."""
    matrix, stack = (ROWS, shape.width), (shape.experts,) if shape.experts else ()
    suffix = "_exps" if stack else ""
    sizes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(["attn_qkv"] if shape.fused else ["attn_q", "attn_k", "attn_v"], matrix),
        **dict.fromkeys(["attn_output", *(["ffn_gate_inp"] if stack else [])], matrix),
        **dict.fromkeys(["attn_norm", "ffn_norm"], (shape.width,)),
        **dict.fromkeys([f"ffn_gate{suffix}", f"ffn_up{suffix}"], (*stack, *matrix)),
        f"ffn_down{suffix}": (*stack, ROWS, shape.ffn),
    }
    yield "token_embd.weight", matrix
    for block in range(shape.blocks)[:: -1 if shape.reversed else 1]:
        yield from ((f"blk.{block}.{name}.weight", size) for name, size in sizes.items())
        yield f"blk.{block}.attn_v.bias", (ROWS,)
    yield "output_norm.weight", (shape.width,)
    if not shape.tied:
        yield "output.weight", matrix


def write_shape(path: Path, shape: Shape) -> None:
    """A file of that shape in f32, with metadata enough for llama-quantize."""
    rng = np.random.RandomState(0)
    numbers = {
        "context_length": 64,
        "embedding_length": shape.width,
        "block_count": shape.blocks,
        "feed_forward_length": shape.ffn,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.sliding_window": 64,
        "vocab_size": ROWS,
        **({"expert_count": shape.experts, "expert_used_count": 2} if shape.experts else {}),
    }
    a = shape.architecture
    metadata = {
        "general.architecture": MetadataValue("string", a),
        **{f"{a}.{key}": MetadataValue("u32", number) for key, number in numbers.items()},
        f"{a}.attention.layer_norm_rms_epsilon": MetadataValue("f32", 1e-5),
        **(
            {f"{a}.attention.layer_norm_epsilon": MetadataValue("f32", 1e-5)}
            if a == "falcon"
            else {}
        ),
    }
    tensors = {name: rng.standard_normal(size).astype(np.float32) for name, size in _tensors(shape)}
    write_gguf(path, metadata, tensors)


def write_weights(path: Path, model: GGUF) -> None:
    """An importance matrix of ones for the model."""
    entries = {n: e for n, e in model.entries.items() if n.startswith("blk.") and len(e.shape) > 1}
    sums = {
        n: np.ones((math.prod(e.shape[:-2]), e.shape[-1]), np.float32) for n, e in entries.items()
    }
    save_importance(
        path,
        ImportanceMatrix(sums, {n: np.ones(len(s), np.float32) for n, s in sums.items()}, "", 1, 1),
    )


def load() -> dict[str, str]:
    """The types of a case's tensors in the order of the file, by `shape: mix options`."""
    recorded_types: dict[str, str] = json.loads(gzip.decompress(RECORD.read_bytes()))
    return recorded_types


def main() -> None:
    program, results = sys.argv[1], {}
    with tempfile.TemporaryDirectory() as folder:
        model, quantized = Path(folder) / "given.gguf", Path(folder) / "made.gguf"
        for shape, mix, options in cases():
            write_shape(model, SHAPES[shape])
            flags = [
                f.replace("WEIGHTS", f"{folder}/i.gguf") for f in quantize_options(mix, options)[0]
            ]
            write_weights(Path(folder) / "i.gguf", GGUF(model))
            command = [program, *flags, str(model), str(quantized), mix]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{shape}, {mix}{options}: {done.stdout}{done.stderr}")
            entries = GGUF(quantized).entries
            types = [str(entries[name].dtype) for name in GGUF(model).entries]
            results[f"{shape}: {mix}{options}"] = " ".join(types)
    RECORD.write_bytes(gzip.compress(json.dumps(results).encode(), mtime=0))
    print(f"{RECORD.name}: {len(results)} cases, {RECORD.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
