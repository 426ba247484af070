"""Patterns that split texts into words, and other rules, by `tokenizer.ggml.pre`: all names of llama.cpp.

Patterns are written as in a tokenizer.json, with what llama.cpp (src/llama-vocab.cpp, src/unicode.cpp) does otherwise:
\\p{Lu} is A-Z and every letter that is not ASCII, \\p{Ll} a-z and those, and marks count as letters where it says so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

IsBorder = Callable[[str, int], bool]


@dataclass(frozen=True, slots=True)
class DigitGroups:
    """Cuts runs of characters that match `of` into groups of three from their end, instead of at words.

    cut_after  cut after groups, so that text before a run joins its first group; else cut before groups
    """

    of: str
    cut_after: bool


@dataclass(frozen=True, slots=True)
class SplitRule:
    """Patterns that split a text one after the other, into their matches and the text between.

    ignore_merges  a word that is a token becomes that token, whatever the merges; "lines": only words of line breaks
    adds_bos       add a BOS token by default
    cleans_spaces  llama_detokenize removes spaces before punctuation and some apostrophes
    byte_level     tokens are spelled in GPT-2's alphabet of bytes; else plainly, with <0x00> to <0xFF> for other bytes
    space_text     spelling of a space in tokens
    border         function that tells whether a word always begins at a place in a text, whatever is around
    json_patterns  the patterns as written in a tokenizer.json; None if unknown
    """

    patterns: tuple[str | DigitGroups, ...]
    ignore_merges: bool | str = False
    adds_bos: bool = False
    cleans_spaces: bool = True
    byte_level: bool = True
    space_text: str = " "
    border: IsBorder | None = None
    json_patterns: tuple[str, ...] | None = None


# ---- where a word always begins


def after_any(text: str, at: int) -> bool:
    """Whether a word surely begins at `at`: a space after text, a line's first letter, or a CJK comma or stop."""
    a, b = text[at - 1], text[at]
    if a == "\n":
        return b.isalpha() and at > 1 and not text[at - 2].isspace()
    return (b == " " and not a.isspace()) or (b in "\u3001\u3002\uff0c" and a.isalpha())


def after_line(text: str, at: int) -> bool:
    """Whether a word surely begins at `at`: between a line break and another character."""
    return (text[at - 1] == "\n") != (text[at] == "\n")


def before_space(text: str, at: int) -> bool:
    """Whether a word surely begins at `at`: a space or line end after a character that is no whitespace."""
    return text[at] in " \n" and not text[at - 1].isspace()


def before_digits(text: str, at: int) -> bool:
    """Whether a word surely begins at `at`: an ASCII digit after another ASCII character."""
    return text[at] in "0123456789" and text[at - 1].isascii() and not text[at - 1].isdigit()


def after_word(text: str, at: int) -> bool:
    """Whether a word surely begins at `at`: a space after an ASCII letter, or a line's first ASCII letter."""
    a, b = text[at - 1], text[at]
    return (b == " " and _is_ascii_letter(a)) or (a == "\n" and _is_ascii_letter(b))


def after_sign(text: str, at: int) -> bool:
    """Whether a word surely begins at `at`: a space after a digit or some signs, or a line's first letter."""
    a, b = text[at - 1], text[at]
    if a == "\n":
        return _is_ascii_letter(b) and at > 1 and not text[at - 2].isspace()
    return b == " " and a in "0123456789.,;:!?)\"'"


def _is_ascii_letter(character: str) -> bool:
    return character.isascii() and character.isalpha()


# ---- patterns

GPT_2_STEP = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS_STEP = r"\p{N}"
SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s+(?!\S)|\s+"
_LINES = r"|\s*[\r\n]+" + _SPACES
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = _SIGNS + _LINES
LLAMA_3_STEP = SHORTENED + "|" + _WORD + r"|\p{N}{1,3}" + _REST
QWEN_2_STEP = SHORTENED + "|" + _WORD + r"|\p{N}" + _REST
QWEN_35_STEP = (
    SHORTENED + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _LINES
)
_CASED = (
    r"[^\r\n\p{L}\p{N}]?%s*%s+%s|[^\r\n\p{L}\p{N}]?%s+%s*%s|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    + _LINES
)


def _cased(upper: str, lower: str, suffix: str, digits: str) -> str:
    """Return a pre-tokenizer pattern whose words end (by `suffix`) where upper follows lower; `digits`: of a number."""
    return _CASED % (upper, lower, suffix, upper, lower, suffix, digits)


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN_STEP = _cased(_UPPER, _LOWER, "", "")
GPT_4O_STEP = _cased(_UPPER, _LOWER, SHORTENED + "?", "{1,3}")
_TEKKEN = _cased(r"\p{Lu}", r"\p{Ll}", "", "")
_GPT_4O = _cased(r"\p{Lu}", r"\p{Ll}", SHORTENED + "?", "{1,3}")
_GPT_4O_MARKS = _cased(r"[\p{Lu}\p{M}]", r"[\p{Ll}\p{M}]", SHORTENED + "?", "{1,3}")
_UNCASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
    + SHORTENED
    + r"?|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    + _LINES
)

_ASCII_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_ASCII_WORD += r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
_DEEPSEEK_3 = _ASCII_WORD + r"[\r\n]*" + _LINES
_KANJI_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_EASTERN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EASTERN, r"\p{N}")
# letters with case, as JavaScript libraries list them
_LATIN_AND_OTHERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]", rf"\s?[{_LATIN_AND_OTHERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$", _EASTERN, r"\p{N}+",
)  # fmt: skip
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|" + _KANJI_KANA
)
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_HAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f\U0002b820-\U0002ceaf"
    "\U0002ceb0-\U0002ebef\uf900-\ufaff\U0002f800-\U0002fa1f]"
)
_KIMI = (
    rf"{_HAN}+|[^\r\n\p{{L}}\p{{N}}]?(?:(?!{_HAN})\p{{L}})+(?:{SHORTENED})?|\p{{N}}{{1,3}}" + _REST
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_JAIS_2 = LLAMA_3_STEP.removesuffix(_SPACES) + "".join(
    rf"|\s{count}(?!\S)" for count in ("{512}", "{256}", "{128}", "{64}", "{32}", "{16}", "{8}", "{4}", "{1,2}")
) + r"|\s{1}"  # fmt: skip
_EXAONE_MOE = (
    SHORTENED
    + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]"
    + _SPACES
)
_BAILING = SHORTENED + "|" + _WORD + r"|\p{N}" + _SIGNS + r"|\s*[\r\n]" + _SPACES
_SEED = SHORTENED + "|" + _WORD + r"|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _LINES
_MINICPM_5 = SHORTENED + "|" + _WORD + r"|\p{N}+" + _REST
_LINE = r"[^\n]+|[\n]+"
_PAIRS = r"[\t\n]|    |  "
_PUNCTUATION = r"[\p{P}$+<=>^~|]+"
_CHAMELEON = (
    r"<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", _PAIRS, r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", GPT_2_STEP,
)  # fmt: skip


def _json_rule(*patterns: str, **settings: Any) -> SplitRule:
    """Return a rule whose patterns are those of a tokenizer.json."""
    return SplitRule(patterns, json_patterns=patterns, **settings)


# names in GGUF files with the same rule; the first name is written
RULES_BY_NAMES = {
    "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe modern-bert exaone4 olmo mpt"
    " jais gigachat a.x-4.0 mellum": _json_rule(GPT_2_STEP),
    "trillion granite-docling": _json_rule(GPT_2_STEP, cleans_spaces=False),
    "smollm command-r": _json_rule(DIGITS_STEP, GPT_2_STEP, cleans_spaces=False),
    "starcoder refact codeshell exaone minerva-7b mellum2": _json_rule(DIGITS_STEP, GPT_2_STEP),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _json_rule(
        LLAMA_3_STEP, ignore_merges=True, adds_bos=True
    ),
    "glm4 glm5": SplitRule((LLAMA_3_STEP,), ignore_merges=True), "dbrx smaug-bpe chatglm-bpe": _json_rule(LLAMA_3_STEP),
    "jais-2": _json_rule(_JAIS_2),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 hunyuan solar-open grok-2": _json_rule(QWEN_2_STEP, cleans_spaces=False),
    "megrez stablelm2": _json_rule(QWEN_2_STEP), "qwen35": _json_rule(QWEN_35_STEP, cleans_spaces=False),
    "laguna": SplitRule((_LINE, QWEN_2_STEP), cleans_spaces=False),
    "ufakzeka": _json_rule(QWEN_2_STEP.removeprefix(SHORTENED + "|"), cleans_spaces=False),
    "bailingmoe bailingmoe2 llada-moe": _json_rule(_BAILING, cleans_spaces=False),
    "seed-coder": _json_rule(_SEED, cleans_spaces=False),
    "minicpm5": _json_rule(r"\p{N}{1,3}", _MINICPM_5, ignore_merges=True),
    "exaone-moe": SplitRule((_EXAONE_MOE,), border=after_sign, json_patterns=(_EXAONE_MOE,)),
    "tekken": SplitRule((_TEKKEN,), True, True, cleans_spaces=False, json_patterns=(TEKKEN_STEP,)),
    "gpt-4o llama4 kanana2 talkie minimax-m2": SplitRule(
        (_GPT_4O,), cleans_spaces=False, json_patterns=(GPT_4O_STEP,)
    ),
    "granite-embed-multi-97m": SplitRule((_GPT_4O_MARKS,), ignore_merges=True, cleans_spaces=False),
    "tiny_aya cohere2moe": SplitRule((DigitGroups(r"\p{N}", True), _UNCASED % "{1,3}"), cleans_spaces=False),
    "youtu": SplitRule((_YOUTU, _UNCASED % ""), ignore_merges=True, cleans_spaces=False),
    "kimi-k2": SplitRule((_KIMI,), cleans_spaces=False),
    "deepseek-llm": SplitRule(_DEEPSEEK_LLM, cleans_spaces=False, border=after_word, json_patterns=_DEEPSEEK_LLM),
    "deepseek-coder": SplitRule(_DEEPSEEK_CODER, cleans_spaces=False, border=after_word, json_patterns=_DEEPSEEK_CODER),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _json_rule(
        r"\p{N}{1,3}", _KANJI_KANA, _DEEPSEEK_3, cleans_spaces=False
    ),
    "spark2_5": SplitRule(
        (r"\p{N}{1,3}", _KANJI_KANA, _ASCII_WORD + r"|[\r\n]" + _SPACES, r"\p{N}"), cleans_spaces=False
    ),
    "afmoe": SplitRule((DigitGroups(r"\p{N}", True), _AFMOE_SCRIPTS, _DEEPSEEK_3), cleans_spaces=False),
    "superbpe": SplitRule((r"\p{N}+", DigitGroups("[0-9]", False)), cleans_spaces=False, border=before_digits),
    "poro-chat": SplitRule((_BLOOM,), cleans_spaces=False, border=after_word),
    "bloom gpt3-finnish": SplitRule((_BLOOM,), border=after_word),
    "viking": SplitRule((_BLOOM, r"\p{N}"), cleans_spaces=False, border=after_word),
    "chameleon": SplitRule(_CHAMELEON, adds_bos=True, cleans_spaces=False),
    "falcon": SplitRule(
        (r"[\p{P}$+<=>^~|`]+", GPT_2_STEP, "[0-9][0-9][0-9]"),
        json_patterns=("Punctuation", GPT_2_STEP, "Digits", "[0-9][0-9][0-9]"),
    ),
    "default": SplitRule((_PUNCTUATION, GPT_2_STEP, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gemma4 granite-embed-multi-311m": SplitRule(
        (_LINE,), "lines", True, byte_level=False, space_text="\u2581", border=after_line
    ),
    "sarvam-moe": SplitRule((_LINE,), cleans_spaces=False, byte_level=False, space_text="\u2581", border=after_line),
    "whitespace": SplitRule((r"\S+",), byte_level=False, border=before_space),
}  # fmt: skip
RULES = {name: rule for names, rule in RULES_BY_NAMES.items() for name in names.split()}


def known_patterns() -> dict[tuple[str, ...], dict[bool, str]]:
    """Map the patterns of a tokenizer.json, then whether it ignores merges, to GGUF's name of the pre-tokenizer."""
    names_by_patterns: dict[tuple[str, ...], dict[bool, str]] = {}
    for names, rule in RULES_BY_NAMES.items():
        if rule.json_patterns is not None:
            names_by_mode = names_by_patterns.setdefault(rule.json_patterns, {})
            names_by_mode.setdefault(bool(rule.ignore_merges), names.split()[0])
    return names_by_patterns
