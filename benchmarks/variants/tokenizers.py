"""Steps of a tokenizer.json: a GGUF vocabulary gives the ids and texts of the tokenizers package, or is refused.

The conversion does not see the package, so that what it reads counts, not its comparison with the package.
"""

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

from benchmarks.variants.outcome import DIFFERENT, EQUAL, INVALID, SAID, Outcome, refused_outcome
from packtrain.common.errors import InputError
from packtrain.conversion.hugging_face import tokenizer_agreement
from packtrain.conversion.hugging_face.plain_checkpoint import read_json
from packtrain.conversion.hugging_face.tokenizer_steps import read_steps
from packtrain.data.tokenizer import split_rules
from tests.hugging_face import added
from tests.test_convert_tokenizers import (
    BYTES,
    CUT,
    PREPEND,
    SPACE,
    TEXT,
    TO_SPACE,
    bytes_json,
    folder_of,
    metaspace,
    pieces_json,
    sequence,
    split,
    step,
    written_tokenizer,
)

Json = dict[str, Any]
WORDS = (
    "hell", "wor", "abc", " ", "  ", "\n", "Hell", "caf\u00e9", "cafe\u0301", "\uff21", "12", "12345", "it's", "I'M",
    "a_b", "!?", "<s>", "</s>", "<tool>", "<unk>", SPACE, "\u4f60\u597d", "\t", "\u0661", "x", "\u00a0", "\u00df",
    "...", "hello world", "\r\n", "ABC abc", "\U0001f44d", "<tool> <tool>", "[x y]",
)  # fmt: skip
BEHAVIORS = "Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"


def normalizer(rng: random.Random, pieces: bool) -> Json | None:
    builders: list[Callable[[], Json]] = [
        lambda: step(rng.choice(("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "ByteLevel"))),
        lambda: step("NFC"),
        lambda: step("Strip", strip_left=rng.random() < 0.5, strip_right=rng.random() < 0.5),
        lambda: step("Prepend", prepend=rng.choice((SPACE, SPACE, "x"))),
        lambda: step("Replace", pattern={"String": rng.choice((" ", " ", "a"))}, content=rng.choice((SPACE, "_"))),
        lambda: step("Replace", pattern={"Regex": rng.choice((" {2,}", r"\s"))}, content=SPACE),
        lambda: step("BertNormalizer", clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=False),
    ]  # fmt: skip
    common_normalizers: list[Any] = (
        [None, TO_SPACE, [PREPEND, TO_SPACE], step("NFC")] if pieces else [None]
    )
    if rng.random() < 0.5:
        listed = rng.choice(common_normalizers)
    else:
        listed = [rng.choice(builders)() for _ in range(rng.choice((1, 1, 2)))]
        listed += [TO_SPACE] * (pieces and rng.random() < 0.5)
    return sequence("normalizers", *listed) if isinstance(listed, list) else listed


def pre_tokenizer(rng: random.Random, pieces: bool) -> Json | None:
    known_patterns = [
        text for row in split_rules.known_patterns() for text in row if "(" in text or "\\" in text
    ]
    flag = rng.random() < 0.5
    builders: list[Callable[[], Json]] = [
        lambda: step(rng.choice(("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "UnicodeScripts"))),
        lambda: metaspace(rng.choice(("always", "first", "never")), split=flag and rng.random() < 0.5),
        lambda: metaspace(replacement="_"),
        lambda: step("Metaspace", replacement=SPACE, add_prefix_space=flag, prepend_scheme="first"),
        lambda: step("Digits", individual_digits=flag),
        lambda: step("Punctuation", behavior=rng.choice(BEHAVIORS)),
        lambda: split(rng.choice((r"\d", r"\s+", r"\p{L}+", *known_patterns)), rng.choice(BEHAVIORS), invert=flag),
        lambda: split(rng.choice(known_patterns)),
        lambda: step("Split", pattern={"String": " "}, behavior=rng.choice(BEHAVIORS), invert=False),
        lambda: step("CharDelimiterSplit", delimiter="l"),
        lambda: step("FixedLength", length=2),
        lambda: step("ByteLevel", add_prefix_space=flag, trim_offsets=True, use_regex=rng.random() < 0.5),
    ]  # fmt: skip
    if pieces and rng.random() < 0.4:
        return rng.choice((None, metaspace("never"), metaspace(), metaspace("first")))
    listed = [rng.choice(builders)() for _ in range(rng.choice((1, 1, 2)))]
    if not pieces and rng.random() < 0.5:
        listed = [split(rng.choice((CUT, *known_patterns)))]
    final_steps = (
        []
        if pieces or rng.random() < 0.1
        else [rng.choice((BYTES, BYTES, BYTES | {"use_regex": True}))]
    )
    return sequence("pretokenizers", *listed, *final_steps)


def option(rng: random.Random, model: Json) -> None:
    name, value = rng.choice((
        ("dropout", 0.5), ("dropout", 0.0), ("unk_token", None), ("unk_token", "<unk>"), ("unk_token", "a"),
        ("continuing_subword_prefix", "##"), ("continuing_subword_prefix", ""), ("end_of_word_suffix", "</w>"),
        ("fuse_unk", False), ("fuse_unk", True), ("byte_fallback", True), ("byte_fallback", False),
        ("ignore_merges", True), ("ignore_merges", False), ("type", "WordLevel"), ("type", "WordPiece"),
    ))  # fmt: skip
    model[name] = value
    if rng.random() < 0.2:
        model["merges"] = model["merges"][rng.randrange(3) : rng.randrange(4, 12)]
    elif rng.random() < 0.2:
        rng.shuffle(model["merges"])
    elif rng.random() < 0.2:
        model["merges"] = [" ".join(pair) for pair in model["merges"]]


def token(rng: random.Random, fast: Json) -> None:
    """Another added token, or flags of one that is there."""
    flags = {
        name: rng.random() < 0.25 for name in ("lstrip", "rstrip", "single_word", "normalized")
    }
    flags = flags if rng.random() < 0.6 else {}
    text = rng.choice(
        ("<tool>", "hell", "abc", " x", SPACE * 2, "caf\u00e9", "cafe\u0301", "[x y]", "ABC", "\n")
    )
    vocabulary, special = fast["model"]["vocab"], rng.random() < 0.5
    beyond = sum(one["id"] >= len(vocabulary) for one in fast["added_tokens"])
    id = vocabulary.get(text, len(vocabulary) + (beyond if rng.random() < 0.9 else 3))
    if rng.random() < 0.3:
        fast["added_tokens"][-1] |= flags
    else:
        fast["added_tokens"].append(added(id, text, special, **flags))


def post_processor(rng: random.Random) -> Json | None:
    first, last, other = (
        {"SpecialToken": {"id": t, "type_id": 0}} for t in ("<s>", "</s>", "<unk>")
    )
    single = rng.choice(([first, TEXT], [TEXT, last], [first, TEXT, last], [TEXT], [other, TEXT], [first, first, TEXT],
                         [last, TEXT, first]))  # fmt: skip
    table = {
        t: {"id": t, "ids": [i], "tokens": [t]} for i, t in enumerate(("<unk>", "<s>", "</s>"))
    }
    template = step("TemplateProcessing", single=single, pair=[*single, {"Sequence": {"id": "B", "type_id": 1}}],
                    special_tokens=table)  # fmt: skip
    end_tokens = {"sep": ["</s>", 2], "cls": ["<s>", 1]}
    spelled = step(
        "ByteLevel", add_prefix_space=rng.random() < 0.5, trim_offsets=False, use_regex=True
    )
    return rng.choice((
        None, template, template, spelled, sequence("processors", spelled, template),
        step("BertProcessing", **end_tokens),
        step("RobertaProcessing", **end_tokens, trim_offsets=True, add_prefix_space=True),
    ))  # fmt: skip


def decoder(rng: random.Random, pieces: bool) -> Json | None:
    strip = step("Strip", content=" ", start=1, stop=0)
    back = step("Replace", pattern={"String": SPACE}, content=" ")
    common_decoder = sequence("decoders", back, step("ByteFallback"), step("Fuse"), strip)
    return rng.choice((
        common_decoder if pieces else step("ByteLevel"), metaspace(), step("WordPiece", prefix="##", cleanup=True),
        None,
        step("BPEDecoder", suffix="</w>"), step("CTC", pad_token="<s>", word_delimiter_token="|", cleanup=True),
        sequence("decoders", back, step("Fuse"), step("Strip", content="l", start=1, stop=1)), step("Fuse"),
    ))  # fmt: skip


def variant(rng: random.Random) -> tuple[Json, Json]:
    """A tokenizer.json, and a tokenizer_config.json beside it."""
    pieces = rng.random() < 0.5
    fast = (pieces_json if pieces else bytes_json)()
    about: Json = {"bos_token": "<s>", "eos_token": "</s>"}
    places = [
        "normalizer",
        "pre_tokenizer",
        "post_processor",
        "decoder",
        "option",
        "token",
        "cut",
        "about",
    ]
    for place in rng.sample(places, rng.choice((1, 1, 2, 3))):
        if place in ("normalizer", "pre_tokenizer", "decoder"):
            fast[place] = globals()[place](rng, pieces)
        elif place == "post_processor":
            fast[place] = post_processor(rng)
        elif place == "cut":
            fast["truncation"] = {
                "max_length": 4,
                "strategy": "LongestFirst",
                "stride": 0,
                "direction": "Right",
            }
        elif place == "about":
            about["add_prefix_space"] = rng.random() < 0.5
        else:
            (token(rng, fast) if place == "token" else option(rng, fast["model"]))
    return fast, about


def compare(rng: random.Random, folder: Path) -> Outcome:
    """One variant: ids of 60 texts with and without special tokens, and the texts of these ids."""
    fast, about = variant(rng)
    path = folder_of(folder, fast, **about) / "tokenizer.json"
    try:
        theirs = tokenizers.Tokenizer.from_file(str(path))
    except BaseException as error:  # the package panics, too
        return Outcome(INVALID, str(error))
    theirs.no_truncation()
    notes: list[str] = []
    tokenizer_agreement._tokenizers_encoder = lambda path: None
    try:
        ours, steps = written_tokenizer(folder, notes), read_steps(path, read_json(path))
    except InputError as error:
        return refused_outcome(error)
    texts = ["".join(rng.choices(WORDS, k=rng.randrange(1, 6))) for _ in range(60)]
    names = (
        [one["content"] for one in fast["added_tokens"]] if "Metaspace puts" in str(notes) else []
    )
    for text in texts:
        if any(name in text for name in names):
            continue  # of spaces beside those the note speaks
        alike = steps.normalize_text(text)
        for special in (False, True):
            expected_ids = theirs.encode(alike, add_special_tokens=special).ids
            got = ours.encode(alike) if special else ours.encode(alike, bos=False, eos=False)
            if expected_ids != got:
                return Outcome(
                    DIFFERENT, f"{alike!r}: {expected_ids} there, {got} here; {describe(fast)}"
                )
        one, two = theirs.decode(expected_ids), ours.decode(got)
        if fast.get("decoder") and one.lstrip(" ") != two.lstrip(" "):
            return Outcome(
                DIFFERENT, f"{expected_ids}: {one!r} there, {two!r} here; {describe(fast)}"
            )
    return Outcome(SAID, " ".join(notes)) if notes else Outcome(EQUAL, describe(fast))


def describe(fast: Json) -> str:
    """The tokenizer.json but for its vocabulary."""
    model = {key: value for key, value in fast["model"].items() if key != "vocab"}
    return str(fast | {"model": model})


warnings.simplefilter("ignore")
