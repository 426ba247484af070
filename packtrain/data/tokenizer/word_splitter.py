"""Pre-tokenization: splits text into words before merging, by the patterns of a rule.

Python's `re` has no \\p{L}: each non-ASCII character is replaced by one that stands for its class, for the patterns.
llama.cpp does the same (src/unicode.cpp), so that ids agree with it even where it differs from the original."""

import re
import unicodedata
from collections.abc import Callable, Iterator
from itertools import pairwise

from packtrain.data.tokenizer.split_rules import SHORTENED, DigitGroups, SplitRule

SPACE_CLASS = "\v"
OTHER = 5  # neither letter, number, mark, punctuation nor symbol
CATEGORIES = {"L": 0, "N": 1, "M": 2, "P": 3, "S": 4}
FIRST_CODE, COUNT = 0xE000, 6  # class characters are in the private use area
# insides of character classes for ASCII; see split_rules.py
ASCII_CLASSES = {
    "L": "A-Za-z", "Lu": "A-Z", "Ll": "a-z", "N": "0-9", "M": "", "P": r"!-#%-*,-/:;?@\[-\]_{}", "S": r"$+<->\^`|~",
}  # fmt: skip
WHITESPACE = re.compile(r"[^\S\x1c-\x1f]+")  # llama.cpp's; Python's \s has more characters
CLASS_IN_PATTERN = re.compile(r"\[\^?(?:\\.|[^\]\\])+\]|\\p\{\w+\}")
CATEGORY = re.compile(r"\\p\{(\w+)\}")
LITERALS = re.compile("([\x80-\U0010ffff])(?:-([\x80-\U0010ffff]))?")
Ranges = tuple[tuple[int, int], ...]

# characters of Unicode 15.1, as in llama.cpp, that Python 3.11 does not know
NEWER_CHARACTERS: dict[str, Ranges] = {
    "L": (
        (0x1123F, 0x11240), (0x11F02, 0x11F02), (0x11F04, 0x11F10), (0x11F12, 0x11F33), (0x1342F, 0x1342F),
        (0x13441, 0x13446), (0x1B132, 0x1B132), (0x1B155, 0x1B155), (0x1DF25, 0x1DF2A), (0x1E030, 0x1E06D),
        (0x1E4D0, 0x1E4EB), (0x2B739, 0x2B739), (0x2EBF0, 0x2EE5D), (0x31350, 0x323AF),
    ),
    "N": ((0x11F50, 0x11F59), (0x1D2C0, 0x1D2D3), (0x1E4F0, 0x1E4F9)),
    "M": (
        (0xCF3, 0xCF3), (0xECE, 0xECE), (0x10EFD, 0x10EFF), (0x11241, 0x11241), (0x11F00, 0x11F01), (0x11F03, 0x11F03),
        (0x11F34, 0x11F3A), (0x11F3E, 0x11F42), (0x13440, 0x13440), (0x13447, 0x13455), (0x1E08F, 0x1E08F),
        (0x1E4EC, 0x1E4EF),
    ),
    "P": ((0x11B00, 0x11B09), (0x11F43, 0x11F4F)),
    "S": (
        (0x2FFC, 0x2FFF), (0x31EF, 0x31EF), (0x1F6DC, 0x1F6DC), (0x1F774, 0x1F776), (0x1F77B, 0x1F77F),
        (0x1F7D9, 0x1F7D9), (0x1FA75, 0x1FA77), (0x1FA87, 0x1FA88), (0x1FAAD, 0x1FAAF), (0x1FABB, 0x1FABD),
        (0x1FABF, 0x1FABF), (0x1FACE, 0x1FACF), (0x1FADA, 0x1FADB), (0x1FAE8, 0x1FAE8), (0x1FAF7, 0x1FAF8),
    ),
    "C": ((0x13439, 0x1343F),),
}  # fmt: skip


def category(code: int) -> str:
    """Return the first letter of a character's category in Unicode 15.1; "" if it is not assigned."""
    unicode_category = unicodedata.category(chr(code))
    if unicode_category != "Cn":
        return unicode_category[0]
    return next((name for name, ranges in NEWER_CHARACTERS.items() if in_ranges(code, ranges)), "")


def lowered(character: str) -> str:
    """Return the lower-case character; the first where there are several, as in llama.cpp."""
    return character.lower()[0]


def in_ranges(code: int, ranges: Ranges) -> bool:
    return any(first <= code <= last for first, last in ranges)


class CharacterClasses(dict[int, str]):
    """Class characters by code of a character, for str.translate; filled on demand.

    sets   sets of characters beyond ASCII that patterns name one by one
    names  all class characters: one for each category, inside or outside of each set
    """

    def __init__(self) -> None:
        self.sets: list[Ranges] = []

    @property
    def names(self) -> str:
        return "".join(map(chr, range(FIRST_CODE, FIRST_CODE + (COUNT << len(self.sets)))))

    def __missing__(self, code: int) -> str:
        if code < 128:
            self[code] = chr(code)
        elif chr(code).isspace():
            self[code] = SPACE_CLASS
        else:
            set_bits = sum(in_ranges(code, ranges) << n for n, ranges in enumerate(self.sets))
            self[code] = chr(FIRST_CODE + COUNT * set_bits + CATEGORIES.get(category(code), OTHER))
        return self[code]

    def add_pattern(self, pattern: str) -> None:
        """Add the sets of characters that a pattern names, so that class characters tell them apart."""
        for matched_set in CLASS_IN_PATTERN.findall(pattern):
            ranges = _literal_ranges(matched_set)
            if ranges and ranges not in self.sets:
                self.sets.append(ranges)

    def translate_pattern(self, pattern: str) -> str:
        """Return the pattern for texts of class characters; call add_pattern with all patterns before the first use."""
        pattern = pattern.replace(SHORTENED, "(?:'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL]))")
        pattern = CLASS_IN_PATTERN.sub(lambda match: self._translate_set(match[0]), pattern)
        return pattern.removesuffix("$") + r"(?![\s\S])" * pattern.endswith("$")

    def _translate_set(self, text: str) -> str:
        ranges = _literal_ranges(text)
        translated = CATEGORY.sub(lambda match: ASCII_CLASSES[match[1]] + self._of(match[1]), text)
        if ranges:
            bit = 1 << self.sets.index(ranges)
            inside_set = (n for n, _ in enumerate(self.names) if n // COUNT & bit)
            translated = LITERALS.sub("", translated).removesuffix("]")
            translated += "".join(chr(FIRST_CODE + n) for n in inside_set) + "]"
        return translated if text.startswith("[") else f"[{translated}]"

    def _of(self, name: str) -> str:
        """Return the class characters of a Unicode category, inside and outside of sets; of Lu those of L."""
        category_number = CATEGORIES[name[0]]
        return "".join(c for n, c in enumerate(self.names) if n % COUNT == category_number)


def _literal_ranges(text: str) -> Ranges:
    return tuple((ord(a), ord(b or a)) for a, b in LITERALS.findall(text))


class WordSplitter:
    """Splits text into words by a rule.

    classes   class characters
    patterns  the rule's patterns over class characters
    """

    def __init__(self, rule: SplitRule) -> None:
        self.classes = CharacterClasses()
        for entry in rule.patterns:
            self.classes.add_pattern(entry.of if isinstance(entry, DigitGroups) else entry)
        self.patterns = [self._translate_pattern(rule_pattern) for rule_pattern in rule.patterns]
        self._split_steps = [_split_step(pattern) for pattern in self.patterns]

    def split(self, text: str) -> list[str]:
        pieces = [text if text.isascii() else text.translate(self.classes)]
        for step in self._split_steps:
            pieces = [word for part in pieces for word in step(part) if word]
        if text.isascii():
            return pieces
        words, offset = [], 0
        for part in pieces:
            words.append(text[offset : offset + len(part)])
            offset += len(part)
        return words

    def _translate_pattern(self, pattern: str | DigitGroups) -> str | DigitGroups:
        if isinstance(pattern, DigitGroups):
            return DigitGroups(self.classes.translate_pattern(pattern.of), pattern.cut_after)
        return self.classes.translate_pattern(pattern)


def _split_step(pattern: str | DigitGroups) -> Callable[[str], list[str]]:
    """Return a function that divides a text into a pattern's matches and the text between."""
    if not isinstance(pattern, DigitGroups):
        return re.compile(f"({pattern})", re.ASCII).split
    runs, after = re.compile(f"{pattern.of}+", re.ASCII), pattern.cut_after

    def split_runs(text: str) -> list[str]:
        cuts = [0, *(cut for run in runs.finditer(text) for cut in _cuts(run, after)), len(text)]
        return [text[a:b] for a, b in pairwise(cuts)]

    return split_runs


def _cuts(run: re.Match[str], cut_after: bool) -> Iterator[int]:
    """Yield where a run of digits is cut, in threes from its right; `cut_after`: after each three, else before."""
    start, end = run.span()
    first_cut = start + (end - start) % 3
    if cut_after:
        yield from range(first_cut if first_cut > start else start + 3, end + 1, 3)
    else:
        yield from range(first_cut, end, 3)
