"""How long grammars take a token: masks at a large vocabulary, while documents that follow the grammars are read.

    python -m benchmarks.grammar VOCAB.gguf [--rounds 3]

Prints median, p95 and largest of a mask with the token accepted after it. Exit code 1 if a p95 is over 1 ms.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from packtrain.data.tokenizer import Tokenizer
from packtrain.gguf import GGUF
from packtrain.inference.grammar import Grammar

MAX_SECONDS = 1e-3
JSON = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
LIST = r"""
root ::= item+
item ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"
"""
SUMS = r"""
root ::= (expr "=" ws num "\n")+
expr ::= term ([-+*/] term)*
term ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num ::= [0-9]+ ws
ws ::= [ \t\n]*
"""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "number": {"type": "number"}},
            "required": ["street"],
        },
    },
    "required": ["name", "age"],
}
PERSON = {
    "name": "Ada Lovelace",
    "age": 36,
    "tags": ["red", "blue"],
    "address": {"street": "St. James's Square"},
}


def documents() -> Iterator[tuple[str, str, str]]:
    """Name of a grammar, its text ('' for the schema) and a document."""
    large_record = {
        f"key {n}": [PERSON, n, -n / 7, None, True, "naïve 🔵 text " * 3] for n in range(20)
    }
    yield "json.gbnf", JSON, json.dumps(large_record, ensure_ascii=False)
    yield "list.gbnf", LIST, "- bread and butter\n- two apples\n" * 40
    yield "arithmetic.gbnf", SUMS, "(a1 +12) *b -3 = 42\n" * 40
    yield "schema", "", json.dumps(PERSON)


def timed(grammar: Grammar, ids: list[int], size: int) -> list[float]:
    """Seconds of each token."""
    seconds = []
    for id in ids:
        start_time = time.perf_counter()
        allowed = grammar.allowed(size)
        grammar.accept(id)
        seconds.append(time.perf_counter() - start_time)
        assert allowed is not None and allowed[id]
    assert grammar.is_complete
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description="seconds of grammars")
    parser.add_argument("vocab", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    tokenizer = Tokenizer(GGUF(args.vocab).metadata)
    size, is_slow = tokenizer.vocab_size, False
    print(f"{size:,} tokens; microseconds of a token: median, p95, largest; milliseconds to begin")
    for name, text, document in documents():
        start_time = time.perf_counter()
        grammar = (
            Grammar.from_gbnf(tokenizer, text)
            if text
            else Grammar.from_schema(tokenizer, json.dumps(SCHEMA))
        )
        begin = time.perf_counter() - start_time
        # some vocabularies begin a text with a space
        start, ids = (tokenizer.encode(t, bos=False, eos=False) for t in ("\n", "\n" + document))
        ids = ids[len(start) :]
        durations = [s for _ in range(args.rounds) for s in timed(grammar.copy(), ids, size)]
        middle, high = np.percentile(durations, [50, 95])
        is_slow |= high > MAX_SECONDS
        percentiles = " ".join(f"{1e6 * s:8,.0f}" for s in (middle, high, max(durations)))
        print(f"{name:16} {len(ids):5,} tokens {percentiles} {1e3 * begin:8,.0f}")
    return int(is_slow)


if __name__ == "__main__":
    sys.exit(main())
