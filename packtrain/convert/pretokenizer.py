"""Which of llama.cpp's pre-tokenizers a tokenizer.json describes: the name for `tokenizer.ggml.pre`.

llama.cpp's converter recognizes them by the ids of one long text; here the steps are compared, which runs nothing.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packtrain.convert.plain import as_list, as_object
from packtrain.errors import InputError
from packtrain.tokenizer.rules import DIGITS_STEP, GPT_2_STEP, known_steps


def pretokenizer_name(path: Path, fast: Mapping[str, Any], ignore_merges: bool) -> str:
    """The name for the steps of a tokenizer.json. Raises InputError for unknown steps."""
    steps, known = tuple(_steps(fast.get("pre_tokenizer"))), known_steps()
    if steps not in known:
        names = dict.fromkeys(name for found in known.values() for name in found.values())
        raise InputError(
            f"{path}: pre_tokenizer splits words by {' '.join(map(repr, steps))[:200]}; only those of"
            f" {', '.join(names)} are known"
        )
    other, *_ = known[steps].values()
    return known[steps].get(ignore_merges, other)


def _steps(given: Any) -> Iterator[str]:
    """The pattern of each splitting step, in order."""
    given = as_object(given)
    kind = given.get("type")
    if kind == "Sequence":
        for step in as_list(given.get("pretokenizers")):
            yield from _steps(step)
    elif kind == "Digits" and given.get("individual_digits") is True:
        yield DIGITS_STEP
    elif kind == "Split":
        yield str(as_object(given.get("pattern")).get("Regex"))
    elif kind == "ByteLevel":
        if given.get("use_regex", True) is not False:
            yield GPT_2_STEP
    else:
        yield str(kind)
