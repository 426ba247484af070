"""Pre-tokenization: how byte-level vocabularies split text into words before merging, by `tokenizer.ggml.pre`.

Python's `re` has no \\p{L}: each non-ASCII character is replaced by one that stands for its class, for the patterns.
llama.cpp does the same (src/unicode.cpp), so that ids agree with it even where it differs from the original.
"""

import re
import unicodedata
from dataclasses import dataclass

OTHER, NUMBERS, LETTERS, MARKS, PUNCTUATION, SYMBOLS, SPACE = (
    "\xd0", "\xd1", "\xd2", "\xd4", "\xd3", "\xd5", "\v",
)  # fmt: skip
NAMES = OTHER + NUMBERS + LETTERS + MARKS + PUNCTUATION + SYMBOLS + SPACE
CLASSES = {"N": NUMBERS, "L": LETTERS, "M": MARKS, "P": PUNCTUATION, "S": SYMBOLS}
# insides of character classes; all patterns are compiled for ASCII
L, N, M = f"A-Za-z{LETTERS}", f"0-9{NUMBERS}", MARKS
P = rf"!-#%-*,-/:;?@\[-\]_{{}}{PUNCTUATION}"
UPPER, LOWER = f"A-Z{LETTERS}", f"a-z{LETTERS}"  # a non-ASCII letter counts as both

GAPS = "|(?s:(?![0-9]{3}).)+"  # all that lies between groups of three digits
SPACES = r"\s+(?!\S)|\s+"
SHORTENED = "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
LINES = rf"\s*[\r\n]+|{SPACES}"
GPT_2 = rf"'(?:[stmd]|re|ve|ll)| ?[{L}]+| ?[{N}]+| ?[^\s{L}{N}]+|{SPACES}"


def _words(letters: str, digits: str) -> str:
    """Letters with one other character before them, groups of digits, and signs with the line breaks after them."""
    word = rf"[^\r\n{L}{N}]?[{letters}]+"
    return rf"{SHORTENED}|{word}|[{N}]{digits}| ?[^\s{letters}{N}]+[\r\n]*|{LINES}"


def _cased(after: str, digits: str) -> str:
    """Words end where an upper-case letter follows a lower-case one; `after` may follow them."""
    word = rf"[^\r\n{L}{N}]?(?:[{UPPER}]*[{LOWER}]+|[{UPPER}]+[{LOWER}]*){after}"
    return rf"{word}|[{N}]{digits}| ?[^\s{L}{N}]+[\r\n/]*|{LINES}"


# the same in the patterns of tokenizer.json files
GPT_2_STEP = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS_STEP = r"\p{N}"
_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _LINES
LLAMA_3_STEP = _SHORTENED + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
QWEN_2_STEP = _SHORTENED + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+%s|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*%s|\p{{N}}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
) + _LINES
TEKKEN_STEP = _CASED % ("", "", "")
GPT_4O_STEP = _CASED % (_SHORTENED + "?", _SHORTENED + "?", "{1,3}")


@dataclass(frozen=True, slots=True)
class Rule:
    """Patterns that split a text one after the other; each covers the whole text.

    whole  a word that is a token becomes that token, whatever the merges
    bos    add a BOS token by default
    steps  the patterns as written in a tokenizer.json; None if unknown
    """

    patterns: tuple[str, ...]
    whole: bool = False
    bos: bool = False
    steps: tuple[str, ...] | None = None


_THREE = _words(L, "{1,3}")
_SIGNS = rf"{P}$+<=>^~|"
# llama-vocab.cpp, llm_tokenizer_bpe and load: names in GGUF files that mean the same; the first one is written
_RULES = {
    "gpt-2 phi-2 exaone4 olmo mpt jais trillion granite-docling gigachat a.x-4.0 mellum": Rule(
        (GPT_2,), steps=(GPT_2_STEP,)
    ),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": Rule(
        (rf"[{N}]|[^{N}]+", GPT_2), steps=(DIGITS_STEP, GPT_2_STEP)
    ),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": Rule(
        (_THREE,), True, True, (LLAMA_3_STEP,)
    ),
    "glm4": Rule((_THREE,), whole=True),
    "dbrx smaug-bpe chatglm-bpe": Rule((_THREE,), steps=(LLAMA_3_STEP,)),
    "qwen2 deepseek-r1-qwen kormo megrez hunyuan solar-open stablelm2 grok-2": Rule(
        (_words(L, ""),), steps=(QWEN_2_STEP,)
    ),
    "qwen35": Rule((_words(L + M, ""),)),
    "tekken": Rule((_cased("", ""),), True, True, (TEKKEN_STEP,)),
    "gpt-4o llama4 kanana2 minimax-m2": Rule(
        (_cased(f"(?:{SHORTENED})?", "{1,3}"),), steps=(GPT_4O_STEP,)
    ),
    "falcon": Rule(
        (rf"[{_SIGNS}`]+|[^{_SIGNS}`]+", GPT_2, f"[0-9]{{3}}{GAPS}"),
    ),
    "default": Rule((rf"[{_SIGNS}]+|[^{_SIGNS}]+", GPT_2, rf"[{N}]+|[^{N}]+", f"[0-9]{{3}}{GAPS}")),
}
RULES = {name: rule for names, rule in _RULES.items() for name in names.split()}


def known_steps() -> dict[tuple[str, ...], dict[bool, str]]:
    """Names of rules by the steps of a tokenizer.json, and by `whole`."""
    names_by_steps: dict[tuple[str, ...], dict[bool, str]] = {}
    for names, rule in _RULES.items():
        if rule.steps is not None:
            names_by_steps.setdefault(rule.steps, {})[rule.whole] = names.split()[0]
    return names_by_steps


# letters and numbers of Unicode 15, as in llama.cpp, that Python 3.11 does not know
NEWER = {
    LETTERS: (
        (0x1123F, 0x11240), (0x11F02, 0x11F02), (0x11F04, 0x11F10), (0x11F12, 0x11F33), (0x1342F, 0x1342F),
        (0x13441, 0x13446), (0x1B132, 0x1B132), (0x1B155, 0x1B155), (0x1DF25, 0x1DF2A), (0x1E030, 0x1E06D),
        (0x1E4D0, 0x1E4EB), (0x2B739, 0x2B739), (0x2EBF0, 0x2EE5D), (0x31350, 0x323AF),
    ),
    NUMBERS: ((0x11F50, 0x11F59), (0x1D2C0, 0x1D2D3), (0x1E4F0, 0x1E4F9)),
}  # fmt: skip


class _Classes(dict[int, str]):
    """The class character of a non-ASCII character, for str.translate; filled on demand."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        if code < 128:
            self[code] = character
        elif character.isspace():
            self[code] = SPACE
        else:
            known = CLASSES.get(unicodedata.category(character)[0], OTHER)
            self[code] = next(
                (name for name, ranges in NEWER.items() if _within(code, ranges)), known
            )
        return self[code]


def _within(code: int, ranges: tuple[tuple[int, int], ...]) -> bool:
    return any(first <= code <= last for first, last in ranges)


CLASS_OF = _Classes()


class Splitter:
    """Splits text into words by a rule."""

    def __init__(self, rule: Rule) -> None:
        self._patterns = [re.compile(pattern, re.ASCII) for pattern in rule.patterns]

    def split(self, text: str) -> list[str]:
        parts = [text if text.isascii() else text.translate(CLASS_OF)]
        for pattern in self._patterns:
            parts = [word for part in parts for word in pattern.findall(part)]
        if text.isascii():
            return parts
        words, at = [], 0
        for part in parts:
            words.append(text[at : at + len(part)])
            at += len(part)
        return words
