"""Which of llama.cpp's pre-tokenizers a tokenizer.json describes: the name for `tokenizer.ggml.pre`.

llama.cpp knows them by the ids of one long text; the steps themselves say it without running anything.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packtrain.convert.plain import as_list, as_object
from packtrain.errors import InputError

# patterns of tokenizer.json files
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS = r"\p{N}"
SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ENDS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA_3 = SHORTENED + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + SIGNS + ENDS
QWEN_2 = SHORTENED + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + SIGNS + ENDS
CAPITALS, SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{CAPITALS}*{SMALL}+%s|[^\r\n\p{{L}}\p{{N}}]?{CAPITALS}+{SMALL}*%s|\p{{N}}%s"
SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + ENDS
TEKKEN = CASED % ("", "", "") + SLASHED
GPT_4O = CASED % (SHORTENED + "?", SHORTENED + "?", "{1,3}") + SLASHED
# steps, and whether a word that is a token is that token whatever the merges say
NAMES: Mapping[tuple[tuple[str, ...], bool], str] = {
    ((GPT_2,), False): "gpt-2",
    ((DIGITS, GPT_2), False): "smollm",
    ((LLAMA_3,), True): "llama-bpe",
    ((LLAMA_3,), False): "dbrx",
    ((QWEN_2,), False): "qwen2",
    ((TEKKEN,), True): "tekken",
    ((TEKKEN,), False): "tekken",
    ((GPT_4O,), False): "gpt-4o",
}


def pretokenizer_name(path: Path, fast: Mapping[str, Any], ignore_merges: bool) -> str:
    """The name for the steps of a tokenizer.json. Raises InputError for steps that have none."""
    steps = tuple(_steps(fast.get("pre_tokenizer")))
    name = NAMES.get((steps, ignore_merges)) or NAMES.get((steps, False))
    if name is None:
        raise InputError(
            f"{path}: pre_tokenizer cuts words by {' '.join(map(repr, steps))[:200]}; only those of"
            f" {', '.join(dict.fromkeys(NAMES.values()))} are known"
        )
    return name


def _steps(given: Any) -> Iterator[str]:
    """The pattern of each step that cuts, in order."""
    given = as_object(given)
    kind = given.get("type")
    if kind == "Sequence":
        for step in as_list(given.get("pretokenizers")):
            yield from _steps(step)
    elif kind == "Digits" and given.get("individual_digits") is True:
        yield DIGITS
    elif kind == "Split":
        yield str(as_object(given.get("pattern")).get("Regex"))
    elif kind == "ByteLevel":
        if given.get("use_regex", True) is not False:
            yield GPT_2
    else:
        yield str(kind)
