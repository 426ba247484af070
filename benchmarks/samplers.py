"""Samplers beside llama.cpp's: python -m benchmarks.samplers --llama-python PYTHON; part of benchmarks.conformance.

From the same logits both draw many tokens with each sampler; how often each token came is compared by a chi-squared
test of homogeneity. Generators of random numbers differ, so that single tokens do not agree; greedy ones must. A
setting that is a little off must be seen. Exit code 1 if anything is not as it should be.
"""

import argparse
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.beside import ask_peer
from packtrain.data.tokenizer import Tokenizer
from packtrain.gguf import GGUF
from packtrain.inference.generator import make_chain
from packtrain.inference.sampling import Sampling
from tests.architectures import random_model

DRAWS, ROWS, MIN_P_VALUE, MIN_PAIR_COUNT = 20_000, 300, 1e-4, 10
STEPS = 4  # tokens of a text, where each depends on those before
GREEDY = Sampling(temp=0.0, repeat_penalty=1.2)
SamplerOptions = dict[str, Any]
# a sampler, its settings, and one that is a little off
CHAINS: list[tuple[str, SamplerOptions, SamplerOptions]] = [
    ("temperature", {"samplers": "temperature", "temp": 0.7}, {"temp": 0.77}),
    ("dynamic temperature", {"samplers": "temperature", "temp": 1.0, "dynatemp_range": 0.6, "dynatemp_exp": 1.3},
     {"dynatemp_exp": 0.9}),
    ("top-k", {"samplers": "top_k", "top_k": 20}, {"top_k": 19}),
    ("top-p", {"samplers": "top_p", "top_p": 0.8}, {"top_p": 0.84}),
    ("min-p", {"samplers": "min_p", "min_p": 0.05}, {"min_p": 0.08}),
    ("typical", {"samplers": "typ_p", "typical": 0.6}, {"typical": 0.7}),
    ("top-n-sigma", {"samplers": "top_n_sigma", "top_n_sigma": 1.5}, {"top_n_sigma": 1.3}),
    ("XTC", {"samplers": "top_k;xtc", "top_k": 30, "xtc_probability": 0.5, "xtc_threshold": 0.04},
     {"xtc_probability": 0.6}),
    ("DRY", {"samplers": "dry;top_k", "top_k": 30, "dry_multiplier": 0.8}, {"dry_multiplier": 0.4}),
    ("DRY without breakers", {"samplers": "dry;top_k", "top_k": 30, "dry_multiplier": 0.8,
                              "dry_sequence_breaker": ("none",)}, {"dry_sequence_breaker": ()}),
    ("penalties", {"samplers": "penalties;top_k", "top_k": 30, "repeat_penalty": 1.3, "frequency_penalty": 0.2,
                   "presence_penalty": 0.3},
     {"frequency_penalty": 0.0}),
    ("logit bias", {"samplers": "", "logit_bias": ("40+1.5", "41-inf", "42-0.7")}, {"logit_bias": ("40+1.5",)}),
    ("Mirostat 1", {"mirostat": 1, "mirostat_ent": 3.0, "mirostat_lr": 0.5, "temp": 1.0}, {"mirostat_lr": 0.2}),
    ("Mirostat 2", {"mirostat": 2, "mirostat_ent": 3.0, "mirostat_lr": 0.5, "temp": 1.0}, {"mirostat_lr": 0.2}),
    ("llama.cpp's default chain", {}, {"min_p": 0.1}),
    ("all at once", {"temp": 1.2, "dynatemp_range": 0.3, "top_k": 60, "top_p": 0.9, "typical": 0.9, "min_p": 0.01,
                     "xtc_probability": 0.3, "xtc_threshold": 0.06, "dry_multiplier": 0.5, "repeat_penalty": 1.1,
                     "logit_bias": ("40+1",)}, {"xtc_probability": 0.45}),
]  # fmt: skip
HEADING = f"""
Samplers, {DRAWS:,} draws of each from the same logits here and in llama.cpp. p is that of a chi-squared test
that both draw from one distribution, at least {MIN_P_VALUE}, and below that for a setting that is a little off.
Mirostat's draws are the last of texts of {STEPS} tokens, whose mu changes. `tfs_z` is no longer in llama.cpp: its
tests have the published definition.

| sampler | tokens that came | p | a little off: p |
|---|---|---|---|"""
Row = tuple[bool, str]


def settings(sampling: Sampling, seed: int = 0) -> SamplerOptions:
    """As benchmarks.sampler_peer wants them: texts of several tokens only where they matter."""
    return asdict(sampling) | {
        "samplers": [name for name in sampling.order if name != "tfs_z"],
        "biases": [*sampling.biases.items()],
        "breakers": sampling.breakers,
        "steps": STEPS if sampling.mirostat else 1,
        "seed": seed,
    }


def ours(
    tokenizer: Tokenizer, sampling: Sampling, seed: int, logits: np.ndarray, recent: list[int]
) -> Iterator[int]:
    """The last token of each text, as benchmarks.sampler_peer draws them."""
    steps, chain = settings(sampling)["steps"], make_chain(tokenizer, sampling, seed, recent)
    for number in range(DRAWS):
        if steps > 1:
            chain = make_chain(tokenizer, sampling, seed + number, recent)
        else:
            chain.index = number
        for _ in range(steps):
            token = chain.choose(logits)
            if steps > 1:
                chain.accept(token)
        yield token


def likelihood(a: Mapping[int, int], b: Mapping[int, int]) -> float:
    """p of a chi-squared test that as many draws of both are from one distribution; rare tokens count together."""
    pairs = [(a.get(id, 0), b.get(id, 0)) for id in {*a, *b}]
    common = [pair for pair in pairs if sum(pair) >= MIN_PAIR_COUNT]
    rare = [pair for pair in pairs if sum(pair) < MIN_PAIR_COUNT]
    cells = [*common, (sum(x for x, _ in rare), sum(y for _, y in rare))] if rare else common
    free = len(cells) - 1
    if not free:
        return 1.0
    chi_square = sum((x - y) ** 2 / (x + y) for x, y in cells)
    cube = 2 / (9 * free)  # Wilson and Hilferty 1931: the cube root is nearly normal
    return math.erfc(((chi_square / free) ** (1 / 3) - (1 - cube)) / math.sqrt(2 * cube)) / 2


def rows(python: str) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as tmp_folder:
        path = Path(tmp_folder) / "vocabulary.gguf"
        random_model(path, "llama")
        tokenizer = Tokenizer(GGUF(path).metadata)
        rng = np.random.default_rng(0)
        logits = (rng.standard_normal(tokenizer.vocab_size) * 1.5).astype(np.float32)
        recent = [30, *tokenizer.encode(":", bos=False), 41, 42, 43, 44]
        recent = [*recent, 50, *recent[:-1]]
        logits[recent] += 2
        logits[44] += 2  # which DRY would not have again
        question = {"model": str(path), "recent": recent, "draws": DRAWS}
        chains = [Sampling(**options) for _, options, _ in CHAINS]
        peer_chains = [settings(sampling, n * DRAWS) for n, sampling in enumerate(chains)]
        drawn = ask_peer(python, **question, chains=peer_chains, logits=logits.tolist())["drawn"]
        for n, ((name, options, change), counts) in enumerate(zip(CHAINS, drawn, strict=True)):
            expected = {int(id): count for id, count in counts.items()}
            samplings = Sampling(**options), Sampling(**options | change)
            p, wrong = (
                likelihood(Counter(ours(tokenizer, s, n * DRAWS, logits, recent)), expected)
                for s in samplings
            )
            good = p >= MIN_P_VALUE > wrong
            said = "" if good else " **no**"
            yield good, f"| {name} | {len(expected)} | {p:.2g}{said} | {wrong:.1e} |"
        greedy_rows = (rng.standard_normal((ROWS, tokenizer.vocab_size)) * 1.5).astype(np.float32)
        greedy_chain = make_chain(tokenizer, GREEDY, 1, recent)
        peer_ids = ask_peer(python, **question, greedy=settings(GREEDY), rows=greedy_rows.tolist())[
            "greedy"
        ]
        equal = sum(
            greedy_chain.choose(row) == id for row, id in zip(greedy_rows, peer_ids, strict=True)
        )
        yield equal == ROWS, f"| greedy | {equal} of {ROWS} equal | - | - |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--llama-python", required=True)
    args, good = parser.parse_args(), True
    print(HEADING)
    for is_good, line in rows(args.llama_python):
        print(line, flush=True)
        good = good and is_good
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
