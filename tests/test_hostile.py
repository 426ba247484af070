"""Hostile files: forty made by hand, each with its own line and exit 2, and some hundred drawn by seed."""

import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fuzz import use_file, use_header
from packtrain.cli.main import BAD_INPUT, main
from packtrain.common.errors import InputError
from packtrain.models.adapter_file import read_adapter
from tests import fuzz
from tests.fuzz import Draft, Fault, encode_value, hostile_bytes, judge_file, limit_resources
from tests.hostile import adapter_draft, header_draft, model_drafts
from tests.test_model_file import save

MIB = 2**20
Change = Callable[[Draft], object]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Draft:
    folder = tmp_path_factory.mktemp("valid")
    save(folder / "valid.gguf")
    use_file(folder / "valid.gguf")  # loads the kernels, which say so and need memory of their own
    return Draft.of(folder / "valid.gguf")


def set_key(key: str, kind: str, value: object) -> Change:
    """The key has this value, whether it was there or not."""

    def change(draft: Draft) -> None:
        other_pairs = [pair for pair in draft.pairs if pair[0] != key.encode()]
        draft.pairs = [*other_pairs, (key.encode(), encode_value(kind, value))]

    return change


def delete_key(key: str) -> Change:
    def change(draft: Draft) -> None:
        draft.pairs = [pair for pair in draft.pairs if pair[0] != key.encode()]

    return change


def tensor(name: str, /, **new_fields: object) -> Change:
    """The tensor of this name has another name, shape, number (of its type) or offset; None takes it away."""

    def change(draft: Draft) -> None:
        i = next(i for i, entry in enumerate(draft.tensors) if entry[0] == name.encode())
        fields = (
            dict(zip(("name", "shape", "number", "offset"), draft.tensors[i], strict=True))
            | new_fields
        )
        draft.tensors[i : i + 1] = [tuple(fields.values())] if fields["name"] else []  # type: ignore[list-item]

    return change


def announce_counts(tensors: int, pairs: int) -> Change:
    return lambda draft: setattr(draft, "announced", (tensors, pairs))


def repeat_pair(draft: Draft) -> None:
    draft.pairs.append(draft.pairs[0])


def not_a_number(draft: Draft) -> None:
    draft.data = struct.pack("<f", float("nan")) * (len(draft.data) // 4)


def strings(count: int, *first_strings: bytes) -> list[bytes]:
    return [*first_strings, *(b"t%d" % i for i in range(count - len(first_strings)))]


Q, NORM = "blk.0.attn_q.weight", "blk.1.attn_norm.weight"
BAD: dict[str, Change] = {
    # the container
    "tensor count 1152921504606": announce_counts(1 << 60, 0),
    "metadata count 1099511627": announce_counts(0, 1 << 40),
    "metadata key general.architecture occurs twice": repeat_pair,
    "general.alignment is 48; it must be a power of two": set_key("general.alignment", "u32", 48),
    "general.alignment is of kind string": set_key("general.alignment", "string", b"32"),
    "tensor name 'blk.1.attn_norm.weight' is longer than 63 bytes or occurs twice": tensor(Q, name=NORM.encode()),
    "blk.0.attn_q.weight has 5 axes; at most 4": tensor(Q, shape=[1] * 5),
    "nothing of that size can be counted": tensor(Q, shape=[1 << 32, 1 << 32]),
    "blk.0.attn_q.weight has unknown tensor type 31": tensor(Q, number=31),
    "rows of blk.0.attn_q.weight have 24 elements; q4_K packs 256": tensor(Q, number=12),
    "is at offset 31, no multiple of the alignment 32": tensor(Q, offset=31),
    "at offset 18446744073709551584, the file has 0": tensor(Q, offset=(1 << 64) - 32),
    "token_embd.weight at offset 0 shares bytes with blk.0.attn_q.weight": tensor(Q, offset=0),
    "split.count is 2; the file must be called NAME-00001-of-00002.gguf": set_key("split.count", "u16", 2),
    # the model
    "general.architecture is 'mamba'": set_key("general.architecture", "string", b"mamba"),
    "general.architecture is None": delete_key("general.architecture"),
    "llama.block_count is 2147483647": set_key("llama.block_count", "u32", 2**31 - 1),
    "llama.block_count is 0": set_key("llama.block_count", "u32", 0),
    "llama.block_count is 2.0": set_key("llama.block_count", "f32", 2.0),
    "llama.attention.head_count is 0": set_key("llama.attention.head_count", "u32", 0),
    "llama.attention.head_count is 5": set_key("llama.attention.head_count", "u32", 5),
    "llama.attention.head_count_kv is 3": set_key("llama.attention.head_count_kv", "u32", 3),
    "llama.embedding_length is missing": delete_key("llama.embedding_length"),
    "llama.context_length is -1": set_key("llama.context_length", "i32", -1),
    "llama.attention.layer_norm_rms_epsilon is nan": set_key("llama.attention.layer_norm_rms_epsilon", "f32", np.nan),
    "llama.feed_forward_length is 1537; it must be at most 1536": set_key("llama.feed_forward_length", "u32", 1537),
    "llama.attention.key_length is 4096; it must be at most 384": set_key("llama.attention.key_length", "u32", 4096),
    "llama.expert_count is 513; it must be at most 512": set_key("llama.expert_count", "u32", 513),
    "llama.rope.freq_base is -10000.0": set_key("llama.rope.freq_base", "f32", -1e4),
    "llama.rope.scaling.type is 'spiral'": set_key("llama.rope.scaling.type", "string", b"spiral"),
    "llama.vocab_size is 77": set_key("llama.vocab_size", "u32", 77),
    "there is no tensor token_embd.weight": tensor("token_embd.weight", name=b"token_embed.weight"),
    "blk.1.attn_norm.weight is missing": tensor(NORM, name=None),
    "tensor rogue is not part of": tensor(NORM, name=b"rogue"),
    "blk.1.attn_norm.weight has shape [12]": tensor(NORM, shape=[12]),
    "must give finite numbers": not_a_number,
    # the vocabulary
    "there is no array tokenizer.ggml.tokens": delete_key("tokenizer.ggml.tokens"),
    "tokenizer.ggml.tokens has 3 tokens": set_key("tokenizer.ggml.tokens", "string", strings(3)),
    "tokenizer.ggml.model is 'spiral'": set_key("tokenizer.ggml.model", "string", b"spiral"),
    "tokenizer.ggml.scores has 2 values": set_key("tokenizer.ggml.scores", "f32", [1.0, 2.0]),
    "tokenizer.ggml.scores is no array of numbers": set_key("tokenizer.ggml.scores", "f32", 1.0),
    "tokenizer.ggml.bos_token_id is 290": set_key("tokenizer.ggml.bos_token_id", "u32", 290),
    "tokenizer.ggml.add_bos_token is 7": set_key("tokenizer.ggml.add_bos_token", "u8", 7),
    "tokens 0 and 3 are both b'a'": set_key("tokenizer.ggml.tokens", "string", strings(290, b"a", b"b", b"c", b"a")),
}  # fmt: skip


def test_there_are_forty() -> None:
    assert len(BAD) >= 40


@pytest.mark.parametrize("line", BAD)
def test_a_bad_file_gets_its_own_line(
    model: Draft, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    path = tmp_path / "bad.gguf"
    changed = replace(model, pairs=[*model.pairs], tensors=[*model.tensors])
    BAD[line](changed)
    path.write_bytes(changed.encode())
    code = main(["generate", str(path), "-p", "the", "-n", "1", "--no-display-prompt"])
    said = capsys.readouterr().err
    assert code == BAD_INPUT and said.startswith("packtrain: error: ")
    assert line in said and said.count("\n") == 1


def test_the_valid_file_is_used(model: Draft, tmp_path: Path) -> None:
    (tmp_path / "good.gguf").write_bytes(model.encode())
    assert main(["generate", str(tmp_path / "good.gguf"), "-p", "the", "-n", "1"]) == 0


# ---- by seed ---------------------------------------------------------------------------------------------------


def count_outcomes(
    drafts: list[Draft], use: Callable[[Path], None], seeds: range, path: Path, room: int
) -> Counter[str]:
    """How many there were of each; raises Fault, with the seed, at the first that must not be."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        path.write_bytes(hostile_bytes(drafts[seed % len(drafts)], seed))
        try:
            with limit_resources(room):
                counts[judge_file(use, path)] += 1
        except Fault as fault:
            raise Fault(f"seed {seed}: {fault}") from fault
    return counts


def test_changed_headers_are_used_or_refused(tmp_path: Path) -> None:
    draft = header_draft(tmp_path)
    path = tmp_path / "hostile.gguf"
    counts = count_outcomes([draft], use_header, range(500), path, 32 * MIB)
    assert counts["used"] > 100 and counts["GGUFError"] > 100, counts


def test_changed_models_are_used_or_refused(tmp_path: Path) -> None:
    drafts, path = model_drafts(tmp_path), tmp_path / "hostile.gguf"
    for draft in drafts:  # loads the kernels, which need memory of their own
        path.write_bytes(draft.encode())
        use_file(path)
    counts = count_outcomes(drafts, use_file, range(120), path, 256 * MIB)
    assert counts["used"] > 5 and counts["InputError"] > 20 and counts["GGUFError"] > 20, counts


def test_changed_adapters_are_used_or_refused(tmp_path: Path) -> None:
    draft, path = adapter_draft(tmp_path), tmp_path / "hostile.gguf"
    path.write_bytes(draft.encode())
    read_adapter(path)  # loads the kernels, which need memory of their own
    counts = count_outcomes([draft], read_adapter, range(500), path, 256 * MIB)
    assert counts["used"] > 50 and counts["InputError"] > 50 and counts["GGUFError"] > 50, counts


@pytest.mark.parametrize(
    "rest",
    [
        ("inspect", []),
        ("eval", ["--data", "text.txt"]),
        ("quantize", ["out.gguf", "Q8_0"]),
        ("chat", []),
    ],
    ids=lambda rest: rest[0],
)
def test_every_command_refuses_in_one_line(
    model: Draft, tmp_path: Path, capsys: pytest.CaptureFixture[str], rest: tuple[str, list[str]]
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(model.encode()[:-4000])
    code = main([rest[0], str(path), *rest[1]])
    said = capsys.readouterr().err
    assert code == BAD_INPUT and said.count("\n") == 1
    assert said.startswith(f"packtrain: error: {path}: ") and "the file has" in said


def allocate(path: Path) -> None:
    np.ones(1 << 26)


def refuse(path: Path) -> None:
    raise InputError("one\ntwo \x1b[2J")


def divide(path: Path) -> None:
    np.ones(1) / np.zeros(1)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (allocate, "MemoryError: Unable to allocate 512. MiB"),
        (divide, "RuntimeWarning: divide by zero"),
        (lambda path: time.sleep(9), "took more than 0.05 seconds"),
    ],
)
def test_faults_are_found(
    use: Callable[[Path], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "SECONDS", 0.05)
    with pytest.raises(Fault, match=message), limit_resources(64 * MIB):
        judge_file(use, Path())


def test_an_error_is_one_line_whatever_it_quotes() -> None:
    assert judge_file(refuse, Path()) == "InputError"
    assert str(InputError("one\ntwo \x1b[2J é")) == r"one\ntwo \x1b[2J é"
