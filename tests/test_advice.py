"""What is given in place of a model's file leads on to one: names of other programs, folders, failed downloads."""

import json
import re
from pathlib import Path

import pytest

from packtrain.cli.main import main
from packtrain.common.errors import InputError
from packtrain.gguf import GGUF

HTML = "<!DOCTYPE html>\n<html>"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, without any models of Ollama."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    return tmp_path


def refusal_text(model_name: str) -> str:
    with pytest.raises(InputError) as raised:
        GGUF(model_name)
    return str(raised.value)


@pytest.mark.parametrize(
    ("model_name", "said"),
    [
        ("google/gemma-3-270m-it",
         r"it is a name on Hugging Face: look for a GGUF file of it at https://huggingface\.co/models\?search=gemma-3-270m"
         r"-it%20gguf, then: hf download OWNER/gemma-3-270m-it-GGUF --include '\*Q8_0\.gguf' --local-dir \.$"),
        ("https://huggingface.co/google/gemma-3-270m-it", r"it is a name on Hugging Face"),
        ("ggml-org/gemma-3-270m-it-GGUF", r": hf download ggml-org/gemma-3-270m-it-GGUF --include '\*Q8_0\.gguf'"),
        ("https://huggingface.co/a/b-GGUF/resolve/main/b-Q8_0.gguf",
         r": hf download a/b-GGUF b-Q8_0\.gguf --local-dir"),
        ("gemma3:270m", r"it is a name of Ollama's: `ollama show --modelfile gemma3:270m` prints the path of its file"),
        ("hf.co/a/b-GGUF:Q8_0", r"`ollama show --modelfile hf\.co/a/b-GGUF:Q8_0` prints"),
        ("models/tiny.gguf", r"there is no folder models$"),
        ("tiny.gguf", r"no such file or directory$"),
        ("x" * 300, r"cannot be read: file name too long$"),
    ],
)  # fmt: skip
def test_names_of_other_places(folder: Path, model_name: str, said: str):
    assert re.search(said, refusal_text(model_name))


@pytest.mark.parametrize("name", ["gemma3:270m", "me/gemma3:270m", "hf.co/me/gemma3:270m"])
def test_ollamas_file_is_named(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    host, owner = (
        ("hf.co" if "hf.co" in name else "registry.ollama.ai"),
        "me" if "me/" in name else "library",
    )
    manifest = folder / "store/manifests" / host / owner / "gemma3/270m"
    manifest.parent.mkdir(parents=True)
    layers = [("license", "sha256:1"), ("model", "sha256:2ab")]
    kinds = [
        {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest}
        for kind, digest in layers
    ]
    manifest.write_text(json.dumps({"layers": kinds}))
    monkeypatch.setenv("OLLAMA_MODELS", str(folder / "store"))
    assert refusal_text(name).endswith(
        f"; Ollama has it as a GGUF file: {folder}/store/blobs/sha256-2ab"
    )
    manifest.write_text("[1")
    assert "ollama show" in refusal_text(name)


def test_near_misses(folder: Path):
    for name in ("gemma-3-270m-q4_k_m.gguf", "other.gguf"):
        (folder / name).write_bytes(b"GGUF")
    assert refusal_text("gemma-3-270m-q4km.gguf").endswith(
        "; did you mean gemma-3-270m-q4_k_m.gguf?"
    )
    assert refusal_text("gemma-3-270m").endswith("; did you mean gemma-3-270m-q4_k_m.gguf?")
    assert refusal_text("llama.gguf").endswith("; there are gemma-3-270m-q4_k_m.gguf, other.gguf")
    assert refusal_text(".").endswith(
        "; it has gemma-3-270m-q4_k_m.gguf, other.gguf: give one of them"
    )


def test_folders_and_safetensors(folder: Path):
    (folder / "a b").mkdir()
    assert refusal_text("a b").endswith("is a directory; give a GGUF file")
    weights = folder / "a b/model.safetensors"
    weights.write_bytes(b"\x10\0\0\0\0\0\0\0" + b'{"a": 1}' + b" " * 16)
    convert = "packtrain convert 'a b' -o 'a b.gguf'"
    assert refusal_text("a b").endswith(f"; make a GGUF file of it: {convert}")
    assert f"it is a safetensors file: {convert} makes a GGUF file" in refusal_text(
        str(weights.relative_to(folder))
    )
    (folder / "a b/adapter_config.json").write_text("{}")
    assert refusal_text("a b").endswith("packtrain convert 'a b' --base BASE.gguf -o 'a b.gguf'")


@pytest.mark.parametrize(
    ("content", "said"),
    [(HTML, "it is a web page about the file"), (POINTER, "it stands for a file in Git LFS")],
)
def test_downloads_of_something_else(folder: Path, content: str, said: str):
    (folder / "m.gguf").write_text(content)
    assert refusal_text("m.gguf").startswith(f"m.gguf: this is not a GGUF file; {said}")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"tjgg\3\0\0\0", "it is a model (ggjt) of llama.cpp from before GGUF"),
        (b"algg\1\0\0\0", "it is a LoRA adapter (ggla) of llama.cpp from before GGUF"),
        (b"pcgg\1\0\0\0", "it is a training checkpoint (ggcp) of llama.cpp from before GGUF"),
        (b"PK\3\4" + bytes(60), "it is a file of PyTorch's: packtrain convert"),
    ],
)
def test_files_from_before_gguf(folder: Path, content: bytes, said: str) -> None:
    (folder / "m.gguf").write_bytes(content)
    assert refusal_text("m.gguf").startswith(f"m.gguf: this is not a GGUF file; {said}")


def test_a_run_folder_is_answered_by_its_model_and_adapter(folder: Path) -> None:
    (folder / "my.run").mkdir()
    for name in ("run.yaml", "checkpoint.gguf"):
        (folder / "my.run" / name).touch()
    assert refusal_text("my.run").endswith("; it is a run's folder: give its model, my.gguf")
    (folder / "my.run" / "adapter.gguf").touch()
    assert refusal_text("my.run").endswith("my.gguf or its adapter, my.run/adapter.gguf")


def test_a_zip_file_is_to_be_unpacked(folder: Path) -> None:
    (folder / "my model.zip").write_bytes(b"PK\3\4" + bytes(60))
    assert refusal_text("my model.zip").endswith("file; unpack it with: unzip 'my model.zip'")


@pytest.mark.parametrize(
    "command",
    ["chat", "generate", "inspect", "data a.txt -m", "finetune --data a.txt", "plan finetune --data a.txt",
     "eval --data a.txt", "choose --data a.txt -o o.gguf tuned.gguf", "merge -o o.gguf a.gguf"],
)  # fmt: skip
def test_every_command_leads_on(folder: Path, command: str, capsys: pytest.CaptureFixture[str]):
    (folder / "a.txt").write_text("a")
    words = command.split()
    position = (
        1
        if words[0] == "merge"
        else len(words)
        if words[-1] in ("-m", words[0])
        else 2
        if words[0] == "plan"
        else 1
    )
    assert main([*words[:position], "gemma3:270m", *words[position:]]) == 2
    assert "ollama show --modelfile gemma3:270m" in capsys.readouterr().err
