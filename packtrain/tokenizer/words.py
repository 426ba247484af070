"""How byte-level vocabularies cut text into words before anything is merged, by the file's `tokenizer.ggml.pre`.

Python's `re` has no \\p{L}: each character beyond ASCII is replaced by one that stands for its class, and the patterns
name those. llama.cpp does the same (src/unicode.cpp); so ids agree with it even where it differs from the original.
"""

import re
import unicodedata
from dataclasses import dataclass

OTHER, NUMBERS, LETTERS, MARKS, PUNCTUATION, SYMBOLS, SPACE = "\xd0\xd1\xd2\xd4\xd3\xd5\v"
CLASSES = {"N": NUMBERS, "L": LETTERS, "M": MARKS, "P": PUNCTUATION, "S": SYMBOLS}
# insides of character classes; all patterns are compiled for ASCII
L, N, M = f"A-Za-z{LETTERS}", f"0-9{NUMBERS}", MARKS
P = rf"!-#%-*,-/:;?@\[-\]_{{}}{PUNCTUATION}"
UPPER, LOWER = f"A-Z{LETTERS}", f"a-z{LETTERS}"  # a letter beyond ASCII counts as both

SPACES = r"\s+(?!\S)|\s+"
SHORTENED = "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
LINES = rf"\s*[\r\n]+|{SPACES}"
GPT_2 = rf"'(?:[stmd]|re|ve|ll)| ?[{L}]+| ?[{N}]+| ?[^\s{L}{N}]+|{SPACES}"


def _words(letters: str, digits: str) -> str:
    """Letters with one other character before them, so many digits, and signs with the line breaks after them."""
    word = rf"[^\r\n{L}{N}]?[{letters}]+"
    return rf"{SHORTENED}|{word}|[{N}]{digits}| ?[^\s{letters}{N}]+[\r\n]*|{LINES}"


def _cased(after: str, digits: str) -> str:
    """Words end where small letters give way to capitals; `after` may follow them."""
    word = rf"[^\r\n{L}{N}]?(?:[{UPPER}]*[{LOWER}]+|[{UPPER}]+[{LOWER}]*){after}"
    return rf"{word}|[{N}]{digits}| ?[^\s{L}{N}]+[\r\n/]*|{LINES}"


@dataclass(frozen=True, slots=True)
class Rule:
    """Patterns that cut a text one after the other, each of which matches all of any text.

    whole  a word that is a token is that token, whatever the merges say
    bos    a BOS token is added where the file does not say
    """

    patterns: tuple[str, ...]
    whole: bool = False
    bos: bool = False


_THREE = _words(L, "{1,3}")
_SIGNS = rf"{P}$+<=>^~|"
# llama-vocab.cpp, llm_tokenizer_bpe and load: the names that a file may give, by what they mean
_RULES = {
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": Rule((_THREE,), True, True),
    "glm4": Rule((_THREE,), whole=True),
    "dbrx smaug-bpe chatglm-bpe": Rule((_THREE,)),
    "qwen2 deepseek-r1-qwen kormo megrez hunyuan solar-open stablelm2 grok-2": Rule((_words(L, ""),)),
    "qwen35": Rule((_words(L + M, ""),)),
    "tekken": Rule((_cased("", ""),), True, True),
    "gpt-4o llama4 kanana2 minimax-m2": Rule((_cased(f"(?:{SHORTENED})?", "{1,3}"),)),
    "gpt-2 phi-2 exaone4 olmo mpt jais trillion granite-docling gigachat a.x-4.0 mellum": Rule((GPT_2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": Rule(
        (rf"[{N}]|[^{N}]+", GPT_2)
    ),
    "falcon": Rule(
        (rf"[{_SIGNS}`]+|[^{_SIGNS}`]+", GPT_2, "[0-9]{3}|(?s:(?![0-9]{3}).)+"),
    ),
    "default": Rule(
        (rf"[{_SIGNS}]+|[^{_SIGNS}]+", GPT_2, rf"[{N}]+|[^{N}]+", "[0-9]{3}|(?s:(?![0-9]{3}).)+")
    ),
}  # fmt: skip
RULES = {name: rule for names, rule in _RULES.items() for name in names.split()}


# letters and numbers of Unicode 15, as llama.cpp has it, that Python 3.11 does not know
NEWER = {
    LETTERS: (
        (0x1123F, 0x11240), (0x11F02, 0x11F02), (0x11F04, 0x11F10), (0x11F12, 0x11F33), (0x1342F, 0x1342F),
        (0x13441, 0x13446), (0x1B132, 0x1B132), (0x1B155, 0x1B155), (0x1DF25, 0x1DF2A), (0x1E030, 0x1E06D),
        (0x1E4D0, 0x1E4EB), (0x2B739, 0x2B739), (0x2EBF0, 0x2EE5D), (0x31350, 0x323AF),
    ),
    NUMBERS: ((0x11F50, 0x11F59), (0x1D2C0, 0x1D2D3), (0x1E4F0, 0x1E4F9)),
}  # fmt: skip


class _Classes(dict[int, str]):
    """What stands for a character beyond ASCII, for str.translate; filled as characters are met."""

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


_CLASSES = _Classes()


class Splitter:
    """Cuts text into words by a rule."""

    def __init__(self, rule: Rule) -> None:
        self._patterns = [re.compile(pattern, re.ASCII) for pattern in rule.patterns]

    def split(self, text: str) -> list[str]:
        parts = [text if text.isascii() else text.translate(_CLASSES)]
        for pattern in self._patterns:
            parts = [word for part in parts for word in pattern.findall(part)]
        if text.isascii():
            return parts
        words, at = [], 0
        for part in parts:
            words.append(text[at : at + len(part)])
            at += len(part)
        return words
