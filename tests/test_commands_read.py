"""The commands that read a model, generate and inspect, from their settings to what they print."""

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from packtrain.cli import event_output, generate, inspect
from packtrain.cli.inspect import InspectSettings
from packtrain.common.errors import DoesNotFit, InputError
from packtrain.common.options import from_values
from packtrain.dtypes import BLOCK_TYPES
from packtrain.gguf import MetadataValue, write_gguf
from packtrain.models.model_file import open_model, save_model
from packtrain.workflows.text_generation import GenerateSettings
from tests.architectures import vocabulary
from tests.models import seeded_weights
from tests.test_generate import STORY
from tests.test_model_file import CONFIG, SHARED, STORIES, needs_shared, save

SAMPLE = SHARED / "text/tinystories_sample.txt"
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save(tmp_path / "m.gguf")
    return tmp_path / "m.gguf"


# ---- generate


@needs_shared
def test_generate_tells_the_known_story(capsys: Capture) -> None:
    settings = GenerateSettings(STORIES, prompt="Once upon a time", n_predict=64, temp=0.0, seed=7)
    assert generate.run(settings) == 0
    out, said = capsys.readouterr()
    assert out == f"Once upon a time{STORY}\n"
    assert "prompt 5 tokens" in said and "generation 63 tokens" in said
    assert "seed 7; ended by the number of tokens" in said


def test_generate_repeats_with_the_seed_it_printed(model: Path, capsys: Capture) -> None:
    settings = GenerateSettings(
        model, prompt="the cat", n_predict=12, temp=2.0, display_prompt=False
    )
    generate.run(settings)
    out, said = capsys.readouterr()
    seed = int(said.partition("seed ")[2].partition(";")[0])
    generate.run(replace(settings, seed=seed))
    assert capsys.readouterr().out == out
    generate.run(replace(settings, seed=seed ^ 1))
    assert capsys.readouterr().out != out


def test_generate_reads_its_prompt_from_a_file(model: Path, capsys: Capture) -> None:
    (model.parent / "p.txt").write_bytes("the caf\u00e9\r\n".encode())
    generate.run(GenerateSettings(model, file=model.parent / "p.txt", n_predict=0))
    assert capsys.readouterr().out == "the caf\u00e9\r\n\n"


def test_generate_goes_on_to_a_full_context(model: Path, capsys: Capture) -> None:
    greedy = GenerateSettings(model, prompt="a", n_predict=-1, temp=0.0)
    for ctx, reads in ((None, CONFIG.context_length), (9, 9)):
        generate.run(replace(greedy, ctx=ctx))
        said = capsys.readouterr().err
        assert "ended by a full context" in said
        assert "prompt 2 tokens, " in said and f"generation {reads - 2} tokens" in said


def test_generate_keeps_what_it_has_when_interrupted(
    model: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    previous_handler, write_out, written = (
        signal.getsignal(signal.SIGINT),
        event_output.write,
        list[str](),
    )

    def then_stop(text: str) -> None:
        write_out(text)
        written.append(text)
        if len(written) == 6:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(event_output, "write", then_stop)
    code = generate.run(GenerateSettings(model, prompt="the", n_predict=-1, temp=9.0, seed=1))
    out, said = capsys.readouterr()
    assert code == 130 and "ended by an interruption" in said
    assert out.startswith("the") and out == "".join(written) + "\n" and len(written) == 7
    assert signal.getsignal(signal.SIGINT) is previous_handler


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"prompt": "a", "file": Path("x")}, "--prompt and --file are both given"),
        ({"file": Path("nowhere.txt")}, "--file: nowhere.txt does not exist"),
        ({"stop": ("x", "")}, "--stop: the text is empty"),
        ({"prompt": "a" * 40}, "the prompt has 41 tokens and the context 32"),
        ({"prompt": "a b", "ctx": 2}, "and the context 2; the prompt must fit"),
        ({"draft_max": 3}, "--draft-max has no effect without --model-draft or --draft-lookup"),
        (
            {"draft_lookup": True, "draft_p_min": 0.1},
            "--draft-p-min has no effect without --model-draft",
        ),
        ({"dynatemp_exp": 2.0}, "--dynatemp-exp has no effect without --dynatemp-range"),
        ({"xtc_threshold": 0.2}, "--xtc-threshold has no effect without --xtc-probability"),
        ({"dry_base": 2.0}, "--dry-base has no effect without --dry-multiplier"),
        ({"dry_sequence_breaker": ("x",)}, "--dry-sequence-breaker has no effect without --dry"),
        ({"mirostat_ent": 4.0}, "--mirostat-ent has no effect without --mirostat"),
    ],
)
def test_generate_says_what_is_wrong(model: Path, change: dict[str, object], line: str) -> None:
    with pytest.raises(InputError) as error:
        generate.run(GenerateSettings(model, **change))  # type: ignore[arg-type]
    assert line in str(error.value)


def test_generate_says_that_sampling_advised_by_the_file_is_not_read(
    tmp_path: Path, capsys: Capture
) -> None:
    advice = {"general.sampling.temp": MetadataValue("f32", 0.6)}
    weights = seeded_weights(CONFIG)
    save_model(tmp_path / "m.gguf", CONFIG, vocabulary() | advice, weights.__getitem__, name="m")
    generate.run(GenerateSettings(tmp_path / "m.gguf", prompt="a", n_predict=1))
    assert (
        "has keys general.sampling, which are not read: only flags count" in capsys.readouterr().err
    )


def test_generate_warns_of_a_context_the_model_was_not_made_for(
    model: Path, capsys: Capture
) -> None:
    for ctx, warned in ((CONFIG.context_length + 1, True), (CONFIG.context_length, False)):
        generate.run(GenerateSettings(model, prompt="a", n_predict=0, ctx=ctx))
        said = capsys.readouterr().err
        assert (f"--ctx {ctx} is more than the model's own context of 32 tokens" in said) == warned


def test_seeds_are_numbers_that_the_generator_takes(model: Path) -> None:
    settings = {"model": model, "prompt": "a", "n_predict": 1}
    assert generate.run(from_values(GenerateSettings, settings | {"seed": 2**63 - 1}, "here")) == 0
    with pytest.raises(InputError, match=r"seed is 9223372036854775808; it must be from -1 to"):
        from_values(GenerateSettings, settings | {"seed": 2**63}, "here")


def test_generate_wants_text(model: Path) -> None:
    (model.parent / "p.bin").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"--file: .*p\.bin is not UTF-8 text"):
        generate.run(GenerateSettings(model, file=model.parent / "p.bin"))


def test_generate_says_that_a_context_does_not_fit(model: Path) -> None:
    with pytest.raises(
        DoesNotFit, match=r"--ctx: the KV cache of 2,000,000,000 tokens needs 178\.8 GiB"
    ):
        generate.run(GenerateSettings(model, prompt="a", ctx=2_000_000_000))


# ---- inspect


def inspected(path: Path, capsys: Capture, **options: bool) -> str:
    assert inspect.run(InspectSettings(path, **options)) == 0
    return capsys.readouterr().out


def test_inspect_shows_the_model(model: Path, capsys: Capture) -> None:
    text = inspected(model, capsys)
    parameters = sum(math.prod(e.shape) for e in open_model(model).gguf.entries.values())
    for line in (
        f"size          {model.stat().st_size:,} bytes",
        "architecture  llama",
        f"parameters    {parameters:,}",
        "tensors       20",
        f"  f32         20    {4 * parameters / 2**20:.2f} MiB",
        "chat template none",
        "vocabulary    290 tokens, kind llama",
        "  llama.attention.layer_norm_rms_epsilon = 1e-06",
        "  tokenizer.ggml.tokens = [290 strings]",
        "  tokenizer.ggml.scores = [290 f32]",
    ):
        assert line in text.splitlines()
    assert "blk.0" not in text


def test_inspect_lists_tensors_and_speaks_json(model: Path, capsys: Capture) -> None:
    assert "blk.1.attn_k.weight                      [12, 24]    f32          1,152 bytes" in (
        inspected(model, capsys, tensors=True).splitlines()
    )
    report = json.loads(inspected(model, capsys, tensors=True, json=True))
    assert report["tensors"][0] == {
        "name": "token_embd.weight", "shape": [290, 24], "type": "f32", "bytes": 27840,
    }  # fmt: skip
    assert report["metadata"]["llama.block_count"] == 2
    assert "tensors" not in json.loads(inspected(model, capsys, json=True))


def test_inspect_takes_any_sound_file(tmp_path: Path, capsys: Capture) -> None:
    keys = {
        "general.architecture": MetadataValue("string", "mamba"),
        "tokenizer.chat_template": MetadataValue("string", "{{ a }}\n" * 40),
        "tokenizer.ggml.tokens": MetadataValue("string", [b"\xff", b"b"]),
        "tokenizer.ggml.eos_token_id": MetadataValue("u32", 1),
        "tokenizer.ggml.bos_token_id": MetadataValue("u32", 77),
        "tokenizer.ggml.padding_token_id": MetadataValue("u32", 0xFFFFFFFF),
        "few": MetadataValue("i16", [1, 2]),
        "odd": MetadataValue("f64", math.nan),
        "exact": MetadataValue("f64", 0.1),
    }
    packed = {name: np.zeros((2, 1), t.numpy) for name, t in BLOCK_TYPES.items()}
    write_gguf(tmp_path / "m.gguf", keys, {**packed, "y": np.zeros(3, np.int8)})
    report = json.loads(inspected(tmp_path / "m.gguf", capsys, json=True))
    assert report["types"]["q4_K"] == {"tensors": 1, "bytes": 288}
    assert report["types"].keys() == {*BLOCK_TYPES, "i8"} and report["parts"] == 1
    assert report["chat_templates"] == ["default"]
    assert report["parameters"] == 2 * sum(t.block for t in BLOCK_TYPES.values()) + 3
    assert report["vocabulary"] == {
        "tokens": 2, "kind": "none", "pre": "",
        "special": {"eos": {"id": 1, "text": "b"}, "bos": {"id": 77, "text": None}},
    }  # fmt: skip
    shown = report["metadata"]
    assert shown["few"] == [1, 2] and shown["odd"] == "nan" and shown["exact"] == 0.1
    assert shown["tokenizer.ggml.tokens"] == ["\ufffd", "b"]
    assert shown["tokenizer.chat_template"].endswith("\u2026 (320 characters)")
    text = inspected(tmp_path / "m.gguf", capsys)
    assert "  few = [1, 2]" in text.splitlines()
    assert any(
        line.startswith("  tokenizer.chat_template = {{ a }}\\n{{") for line in text.splitlines()
    )


def test_inspect_takes_all_parts(tmp_path: Path, capsys: Capture) -> None:
    for i in range(2):
        keys = {"split.no": MetadataValue("u16", i), "split.count": MetadataValue("u16", 2)}
        write_gguf(
            tmp_path / f"m-0000{i + 1}-of-00002.gguf", keys, {f"t{i}": np.zeros(3, np.float32)}
        )
    text = inspected(tmp_path / "m-00002-of-00002.gguf", capsys, tensors=True)
    assert (
        "m-00001-of-00002.gguf and 1 more part\n" in text and "  f32         2     0.00 MiB" in text
    )
    assert "\nt0 " in text and "\nt1 " in text


def test_inspect_does_nothing_to_a_terminal(tmp_path: Path, capsys: Capture) -> None:
    write_gguf(tmp_path / "m.gguf", {"a\x1b[2J\nb": MetadataValue("string", "\x9bc\r")}, {})
    assert r"  a\x1b[2J\nb = \x9bc\r" in inspected(tmp_path / "m.gguf", capsys).splitlines()
    assert inspected(tmp_path / "m.gguf", capsys, json=True).replace("\n", "").isprintable()


def test_inspect_takes_an_empty_file(tmp_path: Path, capsys: Capture) -> None:
    write_gguf(tmp_path / "m.gguf", {}, {})
    text = inspected(tmp_path / "m.gguf", capsys)
    assert "architecture  unknown" in text and "tensors       0" in text
    with pytest.raises(InputError, match="cannot be read: no such file"):
        inspect.run(InspectSettings(tmp_path / "other.gguf"))
