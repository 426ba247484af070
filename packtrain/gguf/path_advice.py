"""Advises on a path that is no GGUF file: where the meant model is, and how to get it as a GGUF file.

Knows names of Hugging Face and Ollama, folders, safetensors, misspelt names, and files that failed downloads leave.
"""

import json
import os
import re
import shlex
from pathlib import Path

from packtrain.common.text import did_you_mean, shortlist

HUB = r"(?:https?:/+)?(?:www\.)?(?:huggingface\.co|hf\.co)/"
REPOSITORY = re.compile(rf"(?:{HUB})?(([\w.-]+)/([\w.-]+))(?:/(?:resolve|blob)/[^/]+/(.+))?")
OLLAMA_PATTERN = re.compile(r"(?:(?:([\w.-]+)/)?([\w.-]+)/)?([\w.-]+):([\w.-]+)")
OLLAMA_FOLDERS = ("$OLLAMA_MODELS", "~/.ollama/models", "/usr/share/ollama/.ollama/models")
OLDER_FORMATS = {  # files of ggml and llama.cpp from before GGUF, by their first bytes
    b"lmgg": "a model (ggml)", b"fmgg": "a model (ggmf)", b"tjgg": "a model (ggjt)", b"algg": "a LoRA adapter (ggla)",
    b"pcgg": "a training checkpoint (ggcp)",
}  # fmt: skip
WEIGHTS = "application/vnd.ollama.image.model"


def missing_model(path: Path) -> str:
    """Return advice for a path that cannot be opened, `; it is …`; empty if there is none."""
    if os.path.isdir(path):
        return _folder_advice(path)
    if os.path.exists(path):  # no error where pathlib raises one, as for a name that is too long
        return ""
    text, peers = str(path), sorted(file.name for file in path.parent.glob("*.gguf"))
    if ollama_match := OLLAMA_PATTERN.fullmatch(text):
        return _ollama_advice(text, *ollama_match.groups())
    hub_match = REPOSITORY.fullmatch(text)
    is_local = path.suffix == ".gguf" or os.path.isdir(path.parent)
    if hub_match and (re.match(HUB, text) or not is_local):
        return _hugging_face_advice(hub_match[1], hub_match[3], hub_match[4])
    if not os.path.isdir(path.parent):
        return f"; there is no folder {path.parent}"
    return did_you_mean(path.name, peers) or (f"; there are {shortlist(peers)}" if peers else "")


def _hugging_face_advice(repository: str, name: str, file: str | None) -> str:
    if file or "gguf" in name.lower():
        pattern = shlex.quote(file) if file else "--include '*Q8_0.gguf'"
        return f"; download it from Hugging Face: hf download {repository} {pattern} --local-dir ."
    return (
        f"; it is a name on Hugging Face: look for a GGUF file of it at https://huggingface.co/models?search={name}%20gguf,"
        f" then: hf download OWNER/{name}-GGUF --include '*Q8_0.gguf' --local-dir ."
    )


def _ollama_advice(text: str, host: str | None, owner: str | None, name: str, tag: str) -> str:
    """Return advice for Ollama's name `text`: its GGUF file's path, by the manifest, or how to find the path."""
    for folder in map(Path, map(os.path.expanduser, map(os.path.expandvars, OLLAMA_FOLDERS))):
        manifest = folder / "manifests" / (host or "registry.ollama.ai") / (owner or "library")
        try:
            layers = json.loads((manifest / name / tag).read_bytes())["layers"]
            digest = next(layer["digest"] for layer in layers if layer["mediaType"] == WEIGHTS)
        except (OSError, ValueError, LookupError, TypeError, StopIteration):
            continue
        return f"; Ollama has it as a GGUF file: {folder / 'blobs' / str(digest).replace(':', '-')}"
    return f"; it is a name of Ollama's: `ollama show --modelfile {text}` prints the path of its file after FROM"


def _folder_advice(folder: Path) -> str:
    files = sorted(file.name for file in folder.iterdir())
    if "run.yaml" in files:
        adapter = f" or its adapter, {folder / 'adapter.gguf'}" if "adapter.gguf" in files else ""
        return f"; it is a run's folder: give its model, {folder.with_suffix('.gguf')}{adapter}"
    if gguf_names := [name for name in files if name.endswith(".gguf")]:
        return f"; it has {shortlist(gguf_names)}: give one of them"
    base = " --base BASE.gguf" if "adapter_config.json" in files else ""
    if base or "config.json" in files or any(name.endswith(".safetensors") for name in files):
        return f"; make a GGUF file of it: {_convert(folder, base)}"
    return "; give a GGUF file"


def _convert(folder: Path, base_option: str = "") -> str:
    """Return the command that converts a checkpoint's folder to a GGUF file."""
    output_name = shlex.quote(f"{folder.resolve().name}.gguf")
    return f"packtrain convert {shlex.quote(str(folder))}{base_option} -o {output_name}"


def content_advice(path: Path, first_bytes: bytes) -> str:
    """Return advice for a file that begins with these bytes, not with GGUF's; empty if there is none."""
    text = first_bytes.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return "; it is a web page about the file: download the file itself, by the page's download link"
    if text.startswith(b"version https://git-lfs"):
        return "; it stands for a file in Git LFS, which `git lfs pull` in its folder downloads"
    if older := OLDER_FORMATS.get(first_bytes[:4]):
        return f"; it is {older} of llama.cpp from before GGUF, which nothing here reads: get the model as a GGUF file"
    if path.suffix.lower() == ".zip":
        return f"; unpack it with: unzip {shlex.quote(str(path))}"
    if first_bytes.startswith((b"PK\x03\x04", b"\x80\x02")):
        return f"; it is a file of PyTorch's: {_convert(path.parent)} makes a GGUF file of its folder, from safetensors"
    if path.suffix == ".safetensors" or first_bytes[8:9] == b"{":
        return (
            f"; it is a safetensors file: {_convert(path.parent)} makes a GGUF file of its folder, with config.json and"
            " the tokenizer's files"
        )
    if first_bytes[8:12] in (b"blk.", b"outp", b"toke"):
        return (
            "; it is an importance matrix in llama.cpp's older format, which llama-imatrix converts:"
            " --in-file OLD -o NEW.gguf"
        )
    return ""
