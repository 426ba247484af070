"""Times of masks on JSON schemas: packtrain's grammars beside llguidance's own, on the same vocabulary.

    python -m benchmarks.mask_times FOLDER VOCABULARY.gguf [--count 200]

FOLDER has files of MaskBench (github.com/guidance-ai/jsonschemabench, maskbench/data), with `schema` and `tests`. The
valid instances that both grammars take are read token by token; a mask is computed before each token. Prints mean,
99 % and largest processor time of a mask, and the ratio of the means. Exit code 1 if it is above 1.2.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.common.errors import InputError
from packtrain.data.tokenizer import Tokenizer
from packtrain.gguf import GGUF
from packtrain.inference.grammar import Grammar
from packtrain.inference.grammar.vocabulary_table import llguidance, table

MAX_RATIO = 1.2


def guidance_times(tokenizer: Tokenizer, schema_text: str, ids: list[int]) -> list[float]:
    """Processor seconds of llguidance's masks; [] if it refuses the schema or the text."""
    library, seconds = llguidance(), list[float]()
    source = library.LLMatcher.grammar_from_json_schema(schema_text)
    matcher = library.LLMatcher(table(tokenizer), source, log_level=0)
    for id in ids:
        start = time.process_time()
        matcher.compute_bitmask()
        seconds.append(time.process_time() - start)
        if matcher.is_error() or not matcher.consume_token(id):
            return []
    return seconds


def packtrain_times(tokenizer: Tokenizer, schema_text: str, ids: list[int]) -> list[float]:
    """Processor seconds of packtrain's masks; [] if it refuses the schema or the text."""
    seconds = list[float]()
    try:
        grammar = Grammar.from_schema(tokenizer, schema_text)
        for id in ids:
            start = time.process_time()
            allowed = grammar.allowed(tokenizer.vocab_size)
            seconds.append(time.process_time() - start)
            if allowed is not None and not allowed[id]:
                return []
            grammar.accept(id)
    except InputError:
        return []
    return seconds


def instances(folder: Path, count: int) -> Iterator[tuple[str, Any]]:
    """Schemas of a sample of files, each with its first valid instance."""
    files = sorted(folder.glob("*.json"))
    for path in random.Random(0).sample(files, min(count, len(files))):
        case = json.loads(path.read_text())
        valid = [test["data"] for test in case["tests"] if test["valid"]]
        if valid:
            yield json.dumps(case["schema"]), valid[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("vocabulary", type=Path)
    parser.add_argument("--count", type=int, default=200)
    options = parser.parse_args()
    tokenizer, num_schemas = Tokenizer(GGUF(options.vocabulary).metadata), 0
    times: tuple[list[float], list[float]] = ([], [])
    packtrain_times(tokenizer, '{"type": "integer"}', tokenizer.encode("12", bos=False))  # tables
    for schema_text, data in instances(options.folder, options.count):
        ids = tokenizer.encode(json.dumps(data, ensure_ascii=False), bos=False, eos=False)
        pair = [read(tokenizer, schema_text, ids) for read in (packtrain_times, guidance_times)]
        if all(pair):
            num_schemas += 1
            times[0].extend(pair[0])
            times[1].extend(pair[1])
    print(f"{num_schemas} of {options.count} schemas taken by both, {len(times[0]):,} masks each")
    for name, seconds in zip(("packtrain", "llguidance"), times, strict=True):
        mean, high, largest = np.mean(seconds), np.quantile(seconds, 0.99), max(seconds)
        print(
            f"{name:10}  mean {1e6 * mean:.0f} µs, 99 % {1e6 * high:.0f}, largest {1e6 * largest:.0f}"
        )
    ratio = float(np.mean(times[0]) / np.mean(times[1]))
    print(f"ratio of the means {ratio:.2f}")
    return int(ratio > MAX_RATIO)


if __name__ == "__main__":
    sys.exit(main())
