"""A tokenizer stays the one it was: every step is written to the GGUF file, said, or refused by its name."""

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from packtrain.common.errors import InputError
from packtrain.conversion.hugging_face import tokenizer_agreement
from packtrain.conversion.hugging_face.checkpoint_folder import CheckpointFolder
from packtrain.conversion.hugging_face.vocabulary import vocabulary_metadata
from packtrain.data.tokenizer import Tokenizer, split_rules
from packtrain.models.arch import families_by_class
from packtrain.models.arch.hf_config import HFConfig
from tests.hugging_face import added, byte_characters

CASES = Path(__file__).parents[2] / "shared/cases/tokens"
SPACE = "\u2581"
FAMILY = families_by_class()["LlamaForCausalLM"][1]


def written_tokenizer(folder: Path, notes: list[str] | None = None, **named: str) -> Tokenizer:
    """The tokenizer of a folder as a GGUF file would have it."""
    config = HFConfig(folder / "config.json", {"bos_token_id": 1, "eos_token_id": 2})
    said: list[str] = []
    vocab_metadata = vocabulary_metadata(
        CheckpointFolder(folder, "LlamaForCausalLM", config, {}), 700, FAMILY, said.append
    )
    if notes is None:
        assert not said
    else:
        notes += said
    return Tokenizer({key: value.value for key, value in vocab_metadata.items()} | named)


def step(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def metaspace(scheme: str = "always", **fields: Any) -> dict[str, Any]:
    return step("Metaspace", replacement=SPACE, prepend_scheme=scheme, split=False) | fields


def split(pattern: str, behavior: str = "Isolated", **fields: Any) -> dict[str, Any]:
    return step("Split", pattern={"Regex": pattern}, behavior=behavior, invert=False) | fields


def sequence(key: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", key: list(steps)}


TO_SPACE = step("Replace", pattern={"String": " "}, content=SPACE)
PREPEND = step("Prepend", prepend=SPACE)
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
CUT = split_rules.QWEN_2_STEP
BYTES = step("ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
SPECIAL = [added(i, text) for i, text in enumerate(("<unk>", "<s>", "</s>"))]
PAIRS = [("h", "e"), ("l", "l"), ("he", "ll"), ("o", "r"), ("w", "or"), ("b", "c"), ("a", "bc")]


def pieces_json() -> dict[str, Any]:
    """SentencePiece's BPE with spaces as U+2581."""
    pairs = [*PAIRS, (SPACE, "wor"), (SPACE, "hell")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    tokens += [*SPACE, *"abcdehlorw", *(a + b for a, b in pairs)]
    vocabulary = {text: id for id, text in enumerate(tokens)}
    model = {"type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True,
             "vocab": vocabulary, "merges": [list(pair) for pair in pairs]}  # fmt: skip
    return {
        "model": model,
        "added_tokens": copy.deepcopy(SPECIAL),
        "pre_tokenizer": metaspace("never"),
    }


def bytes_json() -> dict[str, Any]:
    """Byte-level BPE."""
    pairs = [*PAIRS, ("\u0120", "wor"), ("1", "2")]
    tokens = ["<unk>", "<s>", "</s>", *byte_characters(), *(a + b for a, b in pairs)]
    model = {"type": "BPE", "vocab": {text: id for id, text in enumerate(tokens)},
             "merges": [list(pair) for pair in pairs]}  # fmt: skip
    return {"model": model, "added_tokens": copy.deepcopy(SPECIAL)} | cuts(split(CUT), BYTES)


def folder_of(path: Path, fast: dict[str, Any], **about: Any) -> Path:
    (path / "tokenizer.json").write_text(json.dumps(fast))
    (path / "tokenizer_config.json").write_text(json.dumps(about))
    return path


def cuts(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"pre_tokenizer": sequence("pretokenizers", *steps)}


def with_normalizer(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"normalizer": sequence("normalizers", *steps)}


def special_tokens(**flags: bool) -> list[dict[str, Any]]:
    """The special tokens, with flags of the last one."""
    return [*SPECIAL[:2], added(2, "</s>", **flags)]


def change_tokenizer(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A tokenizer.json with other steps; `model_…` changes an option of its model."""
    for key, value in changes.items():
        if key.startswith("model_"):
            base["model"][key.removeprefix("model_")] = value
        else:
            base[key] = value
    return base


# ---- the cases -------------------------------------------------------------------------------------------------


@pytest.mark.shared
@pytest.mark.skipif(not CASES.exists(), reason="there are no shared cases")
@pytest.mark.parametrize("name", ["always", "never", "lower"])
def test_the_ids_are_those_of_the_tokenizers_package(name: str) -> None:
    expected = json.loads((CASES / "expected.json").read_text())
    if name == "lower":
        with pytest.raises(
            InputError, match="normalizer is NFKC, which a GGUF vocabulary does not have"
        ):
            written_tokenizer(CASES / name)
        return
    tokenizer = written_tokenizer(CASES / name, [])
    for text, ids in zip(expected["texts"], expected["ids"][name], strict=True):
        assert tokenizer.encode(text) == ids


# ids by tokenizers 0.23
RECORDED: dict[str, tuple[dict[str, Any], list[int]]] = {
    "prepended": (with_normalizer(PREPEND, TO_SPACE) | {"pre_tokenizer": None}, [278, 277, 79, 259, 265]),
    "replaced only": ({"normalizer": TO_SPACE, "pre_tokenizer": None}, [272, 277, 79, 259, 265]),
    "metaspace always": ({"pre_tokenizer": metaspace()}, [278, 277, 79, 259, 265]),
    "metaspace of old files": (
        {"pre_tokenizer": step("Metaspace", replacement=SPACE, add_prefix_space=True, split=False)},
        [278, 277, 79, 259, 265],
    ),
    "metaspace never": ({}, [272, 277, 79, 259, 265]),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_a_space_before_a_text_is_as_in_the_steps(name: str, tmp_path: Path) -> None:
    changes, ids = RECORDED[name]
    tokenizer = written_tokenizer(
        folder_of(tmp_path, change_tokenizer(pieces_json(), **changes)), []
    )
    assert tokenizer.encode("hell worL h") == ids


# ---- what is refused -------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "lowercase": (pieces_json, with_normalizer(step("Lowercase"), TO_SPACE), "normalizer is Lowercase"),
    "lowercase bytes": (bytes_json, {"normalizer": step("Lowercase")}, "normalizer is Lowercase"),
    "other spaces": (pieces_json, {"normalizer": TO_SPACE | {"content": "_"}}, "normalizer Replace: content is '_'"),
    "regex": (pieces_json, {"normalizer": TO_SPACE | {"pattern": {"Regex": " "}}}, "normalizer Replace: pattern is"),
    "twice": (pieces_json, with_normalizer(PREPEND, PREPEND, TO_SPACE), "normalizer has Prepend twice"),
    "no spaces": (pieces_json, {"pre_tokenizer": None}, "normalizer must have Replace, or pre_tokenizer Metaspace"),
    "words": (pieces_json, {"pre_tokenizer": step("Whitespace")}, "pre_tokenizer is Whitespace"),
    "prefix": (bytes_json, {"pre_tokenizer": step("ByteLevel", add_prefix_space=True)}, "add_prefix_space is 'True'"),
    "removed": (bytes_json, cuts(split(CUT, "Removed"), BYTES), "Split drops text"),
    "merged": (bytes_json, cuts(split(CUT, "MergedWithNext"), BYTES), "behavior is 'MergedWithNext'"),
    "bytes first": (bytes_json, cuts(BYTES, split(CUT)), "must end with ByteLevel"),
    "dropout": (bytes_json, {"model_dropout": 0.1}, "model BPE: dropout is '0.1'"),
    "prefix of parts": (bytes_json, {"model_continuing_subword_prefix": "##"}, "continuing_subword_prefix is '##'"),
    "suffix of words": (bytes_json, {"model_end_of_word_suffix": "</w>"}, "end_of_word_suffix is '</w>'"),
    "no bytes": (pieces_json, {"model_byte_fallback": False}, "model.byte_fallback must be true"),
    "unigram": (pieces_json, {"model": {"type": "Unigram"}}, "model is Unigram"),
    "unigram of old files": (pieces_json, {"model": {"vocab": [["a", 0.0]]}}, "model must be a BPE with vocab"),
    "words of tokens": (
        bytes_json, {"model_ignore_merges": True, "model_merges": [["h", "e"]]},
        "model.ignore_merges must be False, as for qwen2",
    ),
    "unlisted pairs": (
        pieces_json, {"model_merges": [["h", "e"], ["l", "l"], ["o", "r"], ["w", "or"]]},
        "(its list of merges|the tokenizers package) encodes",
    ),
    "decoder": (bytes_json, {"decoder": step("WordPiece", prefix="##")}, "decoder is WordPiece"),
    "strips": (bytes_json, {"added_tokens": special_tokens(rstrip=True)}, "added token '</s>': rstrip is true"),
    "words only": (bytes_json, {"added_tokens": special_tokens(single_word=True)}, "'</s>': single_word is true"),
    "normalized": (
        pieces_json, with_normalizer(PREPEND, TO_SPACE) | {"added_tokens": special_tokens(normalized=True)},
        "its normalized must be false",
    ),
    "typed spaces": (
        pieces_json, {"added_tokens": [*SPECIAL, added(279, SPACE * 2, special=False)]},
        "its normalized must be true, and normalizer have Replace",
    ),
    "spaces found before they are replaced": (
        pieces_json, {"added_tokens": [*SPECIAL, added(279, SPACE * 2, special=False, normalized=True)]},
        "its normalized must be true, and normalizer have Replace",
    ),
    "an id after a hole": (
        bytes_json, {"added_tokens": [*SPECIAL, added(300, "<x>")]}, "'<x>' has id 300, and its readers give it 268",
    ),
    "an id of another": (bytes_json, {"added_tokens": [added(2, "<s>")]}, "'<s>' has id 2, and its readers give it 1"),
    "decoder of pieces": (bytes_json, {"decoder": metaspace()}, "decoder is Metaspace"),
    "decoder of bytes": (pieces_json, {"decoder": step("ByteLevel")}, "decoder is ByteLevel"),
    "decoder without bytes": (pieces_json, {"decoder": step("Fuse")}, "decoder must have ByteFallback and Replace or"),
    "decoder that cuts": (
        pieces_json, {"decoder": step("Strip", content=" ", start=2, stop=0)}, "decoder Strip: start is '2'",
    ),
    "other first token": (
        bytes_json,
        {"post_processor": step("TemplateProcessing", single=[{"SpecialToken": {"id": "<unk>"}}, TEXT])},
        "post_processor puts <unk> before a text",
    ),
    "not a step": (bytes_json, {"normalizer": ["NFC"]}, "normalizer has .* a step is an object"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_steps_that_a_gguf_vocabulary_does_not_have_are_refused_by_name(
    name: str, tmp_path: Path
) -> None:
    base, changes, line = WRONG[name]
    with pytest.raises(InputError, match=line):
        written_tokenizer(folder_of(tmp_path, change_tokenizer(base(), **changes)), [])


def test_a_space_that_two_files_put_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"add_prefix_space is True, .* put no space before"):
        written_tokenizer(folder_of(tmp_path, pieces_json(), add_prefix_space=True))


# ---- what is said ----------------------------------------------------------------------------------------------

SAID: dict[str, tuple[Any, dict[str, Any], str]] = {
    "spaces there": (pieces_json, {"pre_tokenizer": metaspace()}, "Metaspace puts a space before texts that have none"),
    "first": (pieces_json, {"pre_tokenizer": metaspace("first")}, "also after special tokens"),
    "composed": (bytes_json, {"normalizer": step("NFC")}, "normalizer NFC is not applied"),
    "beyond ASCII": (bytes_json, cuts(split(split_rules.GPT_4O_STEP), BYTES), "pre-tokenizer gpt-4o splits"),
    "truncation": (
        bytes_json, {"truncation": {"max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}},
        "truncation is left out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_what_readers_of_a_gguf_do_otherwise_is_said_in_a_line(name: str, tmp_path: Path) -> None:
    base, changes, line = SAID[name]
    notes: list[str] = []
    written_tokenizer(folder_of(tmp_path, change_tokenizer(base(), **changes)), notes)
    assert len(notes) == 1 and line in notes[0]


def test_bos_and_eos_are_added_as_the_post_processor_does(tmp_path: Path) -> None:
    first, last = ({"SpecialToken": {"id": text, "type_id": 0}} for text in ("<s>", "</s>"))
    listed = {
        text: {"id": text, "ids": [id], "tokens": [text]} for id, text in ((1, "<s>"), (2, "</s>"))
    }
    around = [first, TEXT, last]
    about = {"bos_token": "<s>", "eos_token": "</s>"}
    for single, ids in (
        (None, [265]),
        (around, [1, 265, 2]),
        (around[:2], [1, 265]),
        (around[1:2], [265]),
    ):
        after = (
            None
            if single is None
            else step("TemplateProcessing", single=single, pair=[], special_tokens=listed)
        )
        fast = change_tokenizer(pieces_json(), post_processor=after)
        assert written_tokenizer(folder_of(tmp_path, fast, **about)).encode("h") == ids


def test_tokens_of_phi_3_take_the_spaces_after_them(tmp_path: Path) -> None:
    folder = tmp_path / "phi-3-mini"
    folder.mkdir()
    fast = change_tokenizer(pieces_json(), added_tokens=special_tokens(rstrip=True))
    tokenizer = written_tokenizer(folder_of(folder, fast), **{"general.name": "phi-3-mini"})
    assert tokenizer.encode("h</s>  h") == [265, 2, 265]


# ---- tokenizer.model -------------------------------------------------------------------------------------------


def train_sentencepiece(kind: str, **options: Any) -> bytes:
    words = [f"{a}{b}{c}" for a in "bcdfgh" for b in "aeiou" for c in "lmnrst"]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(words[i::7]) for i in range(7)]), model_writer=model, model_type=kind,
        vocab_size=400, hard_vocab_limit=False, num_threads=1, minloglevel=4, **options,
    )  # fmt: skip
    return model.getvalue()


IDENTITY_RULES = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}


@pytest.mark.parametrize("name", ["nfkc", "plain", "no space in front"])
def test_a_unigram_model_is_written_as_one(name: str, tmp_path: Path) -> None:
    options: dict[str, dict[str, Any]] = {
        "nfkc": {}, "plain": IDENTITY_RULES, "no space in front": IDENTITY_RULES | {"add_dummy_prefix": False},
    }  # fmt: skip
    model_bytes = train_sentencepiece("unigram", **options[name])
    (tmp_path / "tokenizer.model").write_bytes(model_bytes)
    model = sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
    tokenizer = written_tokenizer(tmp_path)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.unk) == (1, 2, 0)
    for text in ("bal cem  dis", " hor\uff21 ", "x\u00e9y bal", ""):
        assert tokenizer.encode(text) == [1, *model.encode(text)]


@pytest.mark.parametrize(
    ("kind", "options", "line"),
    [
        ("unigram", {"byte_fallback": True}, "byte_fallback must be false for UNIGRAM"),
        ("bpe", {"remove_extra_whitespaces": False}, "normalization_rule_name must be identity"),
        ("word", IDENTITY_RULES, "model_type must be BPE or UNIGRAM"),
        (
            "bpe",
            IDENTITY_RULES | {"treat_whitespace_as_suffix": True},
            "treat_whitespace_as_suffix must be",
        ),
    ],
)
def test_sentencepiece_models_that_a_gguf_cannot_have_are_refused(
    kind: str, options: dict[str, Any], line: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(train_sentencepiece(kind, **options))
    with pytest.raises(InputError, match=line):
        written_tokenizer(tmp_path)


def test_runs_of_spaces_that_a_bpe_model_joins_are_said(tmp_path: Path) -> None:
    """Readers of a llama vocabulary keep them; other texts get the model's ids."""
    model_bytes = train_sentencepiece(
        "bpe", **IDENTITY_RULES | {"remove_extra_whitespaces": True, "byte_fallback": True}
    )
    (tmp_path / "tokenizer.model").write_bytes(model_bytes)
    lines: list[str] = []
    tokenizer = written_tokenizer(tmp_path, lines)
    assert any("tokenizer.model: remove_extra_whitespaces is true" in line for line in lines)
    model = sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
    assert tokenizer.encode("bal cem dis") == [1, *model.encode("bal cem dis")]


# ---- the texts -------------------------------------------------------------------------------------------------


def test_other_ids_are_refused_with_the_first_text_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that lowers texts stands for a step that the table does not know."""
    tokenizer = written_tokenizer(folder_of(tmp_path, bytes_json()))
    monkeypatch.setattr(
        tokenizer_agreement,
        "_tokenizers_encoder",
        lambda path: lambda text: tokenizer.encode(text.lower()),
    )
    with pytest.raises(
        InputError, match="the tokenizers package encodes \"Hello World, it's I'M we'll\" as"
    ):
        written_tokenizer(tmp_path)


def test_the_texts_are_about_two_hundred_of_many_scripts_then_neighbours(tmp_path: Path) -> None:
    tokenizer = written_tokenizer(folder_of(tmp_path, bytes_json()))
    texts = list(tokenizer_agreement._hard_texts(tokenizer))
    fixed = len(tokenizer_agreement.SAMPLE_TEXTS.split("|")) * len(
        tokenizer_agreement.FRAME_TEXTS.split("|")
    )
    assert 180 <= fixed <= 240 and len(texts) > fixed
    for part in (
        "e\u0301",
        "\u00e9",
        "\u4f60",
        "\U0001f468\u200d",
        "12345678",
        "\r\n",
        "\n\n",
        "  ",
        "\treturn",
        "\\e",
    ):
        assert any(part in text for text in texts[:fixed]), part


def test_recorded_ids_are_those_of_the_package_where_it_is_installed(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    for changes, ids in RECORDED.values():
        folder_of(tmp_path, change_tokenizer(pieces_json(), **changes))
        hf_tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        assert hf_tokenizer.encode("hell worL h").ids == ids


# ---- the files beside tokenizer.json ---------------------------------------------------------------------------

OTHER_FLAGS: list[tuple[dict[str, Any], str]] = [
    ({"added_tokens_decoder": {"2": added(2, "</s>", lstrip=True)}}, "added token 2: lstrip is True; it must be False"),
    ({"added_tokens_decoder": {"2": added(2, "</s>", single_word=True)}}, "single_word is True"),
    ({"added_tokens_decoder": {"2": added(2, "</s>", special=False)}}, "special is False; it must be True"),
    ({"added_tokens_decoder": {"2": added(2, "<end>")}}, "content is '<end>'; it must be '</s>'"),
    ({"added_tokens_decoder": {"259": added(259, "<x>")}}, "content is '<x>'; it must be 'he'"),
    ({"eos_token": {"content": "</s>", "lstrip": True}}, "'</s>': lstrip is true"),
    ({"additional_special_tokens": [{"content": "</s>", "rstrip": True}]}, "'</s>': rstrip is true"),
]  # fmt: skip


@pytest.mark.parametrize(("about", "line"), OTHER_FLAGS)
def test_flags_of_tokens_that_two_files_state_otherwise_are_refused(
    about: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=line):
        written_tokenizer(folder_of(tmp_path, bytes_json(), **about))


@pytest.mark.parametrize(
    "about",
    [
        {"bos_token": "<s>"},
        {"additional_special_tokens": ["<s>"]},
        {"extra_special_tokens": {"end": {"content": "<s>"}}},
        {"extra_special_tokens": ["<s>"]},
        {"added_tokens_decoder": {"1": added(1, "<s>")}},
    ],
)
@pytest.mark.parametrize("base", [bytes_json, pieces_json])
def test_a_plain_token_that_a_file_makes_special_is_found_in_texts(
    base: Any, about: dict[str, Any], tmp_path: Path
) -> None:
    fast = change_tokenizer(base(), added_tokens=[])
    tokenizer = written_tokenizer(folder_of(tmp_path, fast, **about))
    assert tokenizer.encode("<s>", bos=False) == [1]


def test_no_empty_token_is_the_first_or_last(tmp_path: Path) -> None:
    fast = change_tokenizer(bytes_json(), added_tokens=[*SPECIAL, added(268, "")])
    tokenizer = written_tokenizer(folder_of(tmp_path, fast))
    assert (tokenizer.bos, tokenizer.eos) == (1, 2)


def test_answers_end_at_all_tokens_at_which_the_checkpoints_end(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 259, 260, true, 9999]}')
    tokenizer = written_tokenizer(folder_of(tmp_path, bytes_json()))
    assert (tokenizer.eos, tokenizer.eog_ids) == (2, {2, 259, 260})
    notes: list[str] = []
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 259, 260, 261, 262]}')
    written_tokenizer(tmp_path, notes)
    assert [note for note in notes if "answers do not end at [261, 262] of eos_token_id" in note]


def test_special_tokens_that_would_be_split_are_said(tmp_path: Path) -> None:
    notes: list[str] = []
    written_tokenizer(folder_of(tmp_path, bytes_json(), split_special_tokens=True), notes)
    assert notes and "split_special_tokens is true: special tokens are split there" in notes[0]


@pytest.mark.parametrize("field", [
    {"eos_token": "<none>"}, {"pad_token": {"content": "<none>"}}, {"additional_special_tokens": ["<none>"]},
    {"extra_special_tokens": ["</s>", "<none>"]}, {"image_token": "<none>"},
])  # fmt: skip
def test_special_tokens_that_the_vocabulary_does_not_have_are_said(
    field: dict[str, Any], tmp_path: Path
) -> None:
    notes: list[str] = []
    tokenizer = written_tokenizer(folder_of(tmp_path, bytes_json(), **field), notes)
    assert tokenizer.eos == 2
    assert len(notes) == 1 and "the vocabulary has no tokens '<none>', as" in notes[0]


def test_two_texts_with_one_id_are_refused(tmp_path: Path) -> None:
    fast = bytes_json()
    fast["model"]["vocab"]["a"] = id = fast["model"]["vocab"]["b"]
    with pytest.raises(InputError, match=rf"model\.vocab has id {id} twice; each text needs its"):
        written_tokenizer(folder_of(tmp_path, fast))


def test_a_post_processor_that_puts_another_id_is_refused(tmp_path: Path) -> None:
    special = {"<s>": {"id": "<s>", "ids": [7], "tokens": ["<s>"]}}
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, TEXT]
    template = step("TemplateProcessing", single=single, pair=[], special_tokens=special)
    with pytest.raises(InputError, match=r"post_processor: <s> is \[7\]; it must be \[1\]"):
        written_tokenizer(folder_of(tmp_path, bytes_json() | {"post_processor": template}))


TO_TEXT = step("Replace", pattern={"String": SPACE}, content=" ")
PARTS = (TO_TEXT, step("ByteFallback"), step("Fuse"))
CUT_SPACE = step("Strip", content=" ", start=1, stop=0)


@pytest.mark.parametrize(
    ("has_space", "decoder", "line"),
    [
        (False, [*PARTS, CUT_SPACE], "decoder drops a space before a text"),
        (False, [*PARTS[1:], metaspace()], "decoder drops a space before a text"),
        (True, PARTS, "decoder keeps a space before a text"),
        (True, [*PARTS, CUT_SPACE], ""),
        (False, PARTS, ""),
        (False, [*PARTS[1:], metaspace("never")], ""),
    ],
)
def test_a_space_that_the_decoder_treats_otherwise_is_said(
    has_space: bool, decoder: Any, line: str, tmp_path: Path
) -> None:
    steps = with_normalizer(*([PREPEND, TO_SPACE] if has_space else [TO_SPACE]))
    changes = steps | {"pre_tokenizer": None, "decoder": sequence("decoders", *decoder)}
    notes: list[str] = []
    written_tokenizer(folder_of(tmp_path, change_tokenizer(pieces_json(), **changes)), notes)
    assert len(notes) == bool(line) and line in "".join(notes)


def test_a_token_that_only_added_tokens_json_has_is_found_in_texts(tmp_path: Path) -> None:
    folder_of(tmp_path, bytes_json())
    (tmp_path / "added_tokens.json").write_text('{"<|tool|>": 268, "</s>": 2}')
    assert written_tokenizer(tmp_path).encode("<|tool|>", bos=False) == [268]
    (tmp_path / "added_tokens.json").write_text('{"<|tool|>": 259}')
    with pytest.raises(InputError, match=r"added token 259: content is .*; it must be 'he'"):
        written_tokenizer(tmp_path)
