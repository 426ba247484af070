"""Files as llama-quantize writes them, a table of benchmarks.conformance.

Where types depend on the architecture: falcon's own mixes, and gpt-oss's experts in MXFP4, beside Q8_0 as in the files
that people have, and beside BF16 as a converted checkpoint has them. Then one mix of every architecture. Tensors must
have the types that `packtrain quantize` chooses where it has the mix, and packtrain must compute what llama.cpp
computes with the same weights unpacked.
"""

import random
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.beside import (
    REPLY,
    ask_peer,
    greedy_reply,
    logits,
    logprob_error,
    peer_logprobs,
    run_silently,
)
from packtrain.gguf import GGUF, write_gguf
from packtrain.models.config import Config
from packtrain.models.model_file import open_model, save_model
from packtrain.models.quant_recipe import MIXES
from tests.architectures import CONFIGS, random_model, random_weights, vocabulary

EXPERTS, WITH_BF16, DEFAULT_MIX = "MXFP4_MOE", "MXFP4_MOE and BF16", "Q4_K_M"
FALCONS = (
    "Q2_K",
    "Q3_K_S",
    "Q3_K_M",
    "Q3_K_L",
    "Q4_0",
    "Q4_K_S",
    "Q4_K_M",
    "Q5_K_M",
    "Q6_K",
    "IQ4_XS",
)
BLOCKS = 16  # from which on the first sixteenth of the blocks has one
CASES = {
    ("gpt-oss", 0): (EXPERTS, WITH_BF16),
    ("falcon", BLOCKS): FALCONS,
    ("falcon 40b", BLOCKS): ("Q3_K_M", "Q4_K_M"),
}
LIMIT, TOKENS = 0.01, 48
HEADING = f"""
Files that llama-quantize writes where types depend on the architecture: falcons of {BLOCKS} blocks in their own mixes,
and gpt-oss with experts in MXFP4, the others in Q8_0 or left in BF16. Types are compared with those that `packtrain
quantize` chooses, if it has the mix; logits as above, beside llama.cpp on that file, and, with a limit, on its weights
unpacked, for which it rounds no activations. The last row is of all rows of the first table, types only.

| architecture | mix | types | chosen by packtrain, too | largest difference | unpacked | limit | reply equal |
|---|---|---|---|---|---|---|---|"""
Row = tuple[bool, str]  # whether it is good


def rows(python: str, program: Path) -> Iterator[Row]:
    """A row for each architecture and mix; `program` is llama-quantize."""
    for (name, blocks), mixes in CASES.items():
        for mix in mixes:
            with tempfile.TemporaryDirectory() as tmp_folder:
                folder = Path(tmp_folder)
                config = replace(CONFIGS[name], block_count=blocks or CONFIGS[name].block_count)
                save(folder / "F32.gguf", config)
                path = quantized(program, folder / "F32.gguf", mix)
                yield compare_mix(python, name, mix, path, folder)
    type_counts = [in_one_mix(program, name) for name in CONFIGS]
    equal, count = (sum(column) for column in zip(*type_counts, strict=True))
    said = "" if equal == count else " **no**"
    title = f"| all {len(type_counts)} | {DEFAULT_MIX} | - | {equal} of {count}{said}"
    yield equal == count, f"{title} | - | - | - | - |"


def save(path: Path, config: Config) -> None:
    weights = random_weights(config)
    save_model(path, config, vocabulary(), weights.__getitem__, name="random", dtype="f32")


def quantized(program: Path, source_path: Path, mix: str) -> Path:
    """The file that llama-quantize writes beside it; with BF16 only the experts are taken from that."""
    path = source_path.with_name("quantized.gguf")
    kind = EXPERTS if mix == WITH_BF16 else mix
    done = subprocess.run(
        [str(program), str(source_path), str(path), kind], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"llama-quantize ended with {done.returncode}: {done.stderr[-2000:]}")
    if mix != WITH_BF16:
        return path
    run_silently("quantize", source_path, source_path.with_name("bf16.gguf"), "BF16")
    experts, bf16_file = GGUF(path), GGUF(source_path.with_name("bf16.gguf"))
    packed = {name for name, entry in experts.entries.items() if str(entry.dtype) == "mxfp4"}
    arrays = {
        name: (experts if name in packed else bf16_file).array(name) for name in bf16_file.entries
    }
    write_gguf(source_path.with_name("both.gguf"), bf16_file.values, arrays)
    return source_path.with_name("both.gguf")


def compare_mix(python: str, name: str, mix: str, path: Path, folder: Path) -> Row:
    model, rng = open_model(path), random.Random(0)
    tokens = [1, *(rng.randrange(3, model.config.vocab_size) for _ in range(TOKENS - 1))]
    with tempfile.NamedTemporaryFile(suffix=".npy") as scores:
        answer = ask_peer(python, model=str(path), tokens=tokens, count=REPLY, scores=scores.name)
        theirs = np.load(scores.name)
    ours, written = logits(model, tokens), greedy_reply(model, tokens)
    token_matches = [a == b for a, b in zip(written, answer["reply"], strict=True)]
    unpacked = folder / "unpacked.gguf"
    run_silently("quantize", path, unpacked, "F32", "--allow-requantize")
    exact = logprob_error(ours, peer_logprobs(python, tokens, {"model": str(unpacked)}))
    counts = Counter(str(entry.dtype) for entry in model.gguf.entries.values())
    types = ", ".join(f"{kind} {counts[kind]}" for kind in sorted(counts))
    equal, of = as_ours(path, folder / "F32.gguf", mix)
    good = exact <= LIMIT and equal == of
    as_packtrain = f"{equal} of {of}" if of else "-"
    until = token_matches.index(False) if False in token_matches else REPLY
    return good, (
        f"| {name} | {mix} | {types} | {as_packtrain} | {logprob_error(ours, theirs):.1e} | {exact:.1e} | {LIMIT}"
        f"{'' if good else ' **no**'} | {until} of {REPLY} |"
    )


def as_ours(path: Path, source_path: Path, mix: str) -> tuple[int, int]:
    """How many tensors have the type that `packtrain quantize` gives them, and of how many."""
    if mix not in MIXES:
        return 0, 0
    run_silently("quantize", source_path, source_path.with_name("ours.gguf"), mix)
    our_types, their_types = (
        {name: entry.dtype for name, entry in GGUF(file).entries.items()}
        for file in (source_path.with_name("ours.gguf"), path)
    )
    return sum(our_types.get(name) is kind for name, kind in their_types.items()), len(
        {*our_types, *their_types}
    )


def in_one_mix(program: Path, name: str) -> tuple[int, int]:
    with tempfile.TemporaryDirectory() as tmp_folder:
        source_path = Path(tmp_folder) / "F32.gguf"
        random_model(source_path, name)
        return as_ours(quantized(program, source_path, DEFAULT_MIX), source_path, DEFAULT_MIX)
