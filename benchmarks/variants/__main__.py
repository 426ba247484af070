"""Generated variants of what comes from elsewhere: equal to the reference package, or refused by name.

    pip install torch transformers peft tokenizers jsonschema llguidance
    python -m benchmarks.variants [KIND …] [--count 300] [--seed 0] [--only N] [--verbose]

tokenizers  steps of a tokenizer.json: ids and texts by the tokenizers package
rope        rope settings of a config.json: logits by transformers
adapters    fields of an adapter_config.json: logits by PEFT, there and back
schemas     JSON schemas: documents that jsonschema takes and refuses, and documents that the grammar writes
rows        keys of rows and messages: the turns that are trained on, and that no text is lost
layers      patterns of sliding layers, contexts and chunks: logits by transformers

A variant that the reference package refuses is replaced by another. Prints counts for each kind and every difference;
exit code 1 if there is one that was not said.
"""

import argparse
import importlib
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

from benchmarks.variants.outcome import DIFFERENT, EQUAL, INVALID, REFUSED, SAID, Compare, Outcome

KINDS = ("tokenizers", "rope", "adapters", "schemas", "rows", "layers")


def judged(compare: Compare, kind: str, seed: int, number: int) -> Outcome:
    """The outcome of one variant, which its number determines."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return compare(random.Random(f"{kind} {seed} {number}"), Path(folder))
        except Exception:
            return Outcome(DIFFERENT, traceback.format_exc())


def run(kind: str, count: int, seed: int, verbose: bool) -> bool:
    """Whether no variant of this kind differs."""
    compare: Compare = importlib.import_module(f"benchmarks.variants.{kind}").compare
    counts, reasons, number, start_seconds = Counter[str](), Counter[str](), 0, time.monotonic()
    while sum(counts.values()) - counts[INVALID] < count and counts[INVALID] <= 20 * count:
        outcome = judged(compare, kind, seed, number)
        counts[outcome.verdict] += 1
        if outcome.verdict == DIFFERENT or verbose:
            print(f"{kind} {number}: {outcome.verdict}: {outcome.detail}", flush=True)
        if outcome.verdict == REFUSED:
            reasons[outcome.detail] += 1
        number += 1
    invalid_note = f"; {counts[INVALID]} more {INVALID}" if counts[INVALID] else ""
    verdict_counts = ", ".join(
        f"{counts[name]} {name}" for name in (EQUAL, SAID, REFUSED, DIFFERENT)
    )
    seconds = time.monotonic() - start_seconds
    print(
        f"{kind}: {count} variants from seed {seed}: {verdict_counts}{invalid_note} ({seconds:.0f} s)",
        flush=True,
    )
    return not counts[DIFFERENT]


def main() -> int:
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("kinds", nargs="*", metavar="KIND", choices=[[], *KINDS])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="judge the variant of this number")
    parser.add_argument("--verbose", action="store_true", help="say what became of every variant")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    sound = True
    for kind in args.kinds or KINDS:
        if args.only is not None:
            compare = importlib.import_module(f"benchmarks.variants.{kind}").compare
            print(judged(compare, kind, args.seed, args.only))
        else:
            sound &= run(kind, args.count, args.seed, args.verbose)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
