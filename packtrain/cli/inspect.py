"""packtrain inspect: show what is in a GGUF file of any architecture."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.common.errors import printable
from packtrain.common.options import option, positional
from packtrain.common.text import plural
from packtrain.data.tokenizer import KEYS, NO_ID
from packtrain.gguf import GGUF, MetadataValue

MAX_ITEMS, MAX_CHARS = 8, 100  # array values, and characters of a text, that are shown
TOKENS_KEY, ID_SUFFIX = f"{KEYS}tokens", "_token_id"
TEMPLATE = "tokenizer.chat_template"
MIB = 2**20


@dataclass(frozen=True)
class InspectSettings:
    """Show what is in a GGUF file."""

    model: Path = positional("a GGUF file")
    tensors: bool = option(False, "list all tensors: name, shape in NumPy order, type, bytes")
    json: bool = option(False, "print JSON")


def run(settings: InspectSettings) -> int:
    """Print the file's description; returns 0. Raises InputError if it is not a valid GGUF file."""
    description = describe(GGUF(settings.model))
    if not settings.tensors:
        del description["tensors"]
    if settings.json:
        print(json.dumps(description, indent=2))
    else:
        print("\n".join(map(printable, description_lines(description))))
    return 0


def describe(gguf: GGUF) -> dict[str, Any]:
    """Return the description of a file as plain data, which --json prints."""
    entries = gguf.entries.values()
    template_keys = [key.removeprefix(TEMPLATE) for key in gguf.values if key.startswith(TEMPLATE)]
    stats_by_type: dict[str, dict[str, int]] = {}
    for e in entries:
        stats = stats_by_type.setdefault(str(e.dtype), {"tensors": 0, "bytes": 0})
        stats["tensors"] += 1
        stats["bytes"] += e.nbytes
    largest_first = sorted(stats_by_type.items(), key=lambda item: -item[1]["bytes"])
    return {
        "file": str(gguf.path), "parts": len(gguf.paths), "file_bytes": gguf.nbytes,
        "architecture": _display_value(
            gguf.values.get("general.architecture", MetadataValue("string", "unknown"))
        ),
        "parameters": sum(math.prod(e.shape) for e in entries), "types": dict(largest_first),
        "vocabulary": _vocabulary_info(gguf),
        # a template without a name is `default`
        "chat_templates": [key[1:] or "default" for key in template_keys if not key or key[0] == "."],
        "metadata": {key: _display_value(value) for key, value in gguf.values.items()},
        "tensors": [
            {"name": e.name, "shape": list(e.shape), "type": str(e.dtype), "bytes": e.nbytes}
            for e in entries
        ],
    }  # fmt: skip


def description_lines(description: dict[str, Any]) -> Iterator[str]:
    """Yield the description of a file as lines of text."""
    vocabulary = description["vocabulary"]
    parts_text = (
        f" and {plural(description['parts'] - 1, 'more part')}" if description["parts"] > 1 else ""
    )
    yield f"file          {description['file']}{parts_text}"
    yield f"size          {description['file_bytes']:,} bytes"
    yield f"architecture  {description['architecture']}"
    yield f"parameters    {description['parameters']:,}"
    yield f"tensors       {sum(stats['tensors'] for stats in description['types'].values())}"
    for name, stats in description["types"].items():
        yield f"  {name:12}{stats['tensors']:<6}{stats['bytes'] / MIB:,.2f} MiB"
    kind_text = " ".join(filter(None, (vocabulary["kind"], vocabulary["pre"])))
    yield f"vocabulary    {plural(vocabulary['tokens'], 'token')}, kind {kind_text}"
    for name, token in vocabulary["special"].items():
        yield f"  {name:12}{token['id']} {token['text']}"
    yield f"chat template {', '.join(description['chat_templates']) or 'none'}"
    yield "metadata"
    for key, value in description["metadata"].items():
        yield f"  {key} = {value}"
    for tensor in description.get("tensors", ()):
        shape = str(tensor["shape"])
        yield f"{tensor['name']:32} {shape:>16} {tensor['type']:>6} {tensor['bytes']:>14,} bytes"


def _vocabulary_info(gguf: GGUF) -> dict[str, Any]:
    """Return plain data about the vocabulary: its number of tokens, kind, and special tokens."""
    token_list = gguf.metadata.get(TOKENS_KEY)
    tokens = token_list if isinstance(token_list, list) else []
    special = {}
    for key, id in gguf.metadata.items():
        if key.startswith(KEYS) and key.endswith(ID_SUFFIX) and isinstance(id, int) and id != NO_ID:
            text = tokens[id].decode(errors="replace") if 0 <= id < len(tokens) else None
            special[key.removeprefix(KEYS).removesuffix(ID_SUFFIX)] = {"id": id, "text": text}
    kind, pre = (
        _display_value(gguf.values.get(f"{KEYS}{name}", MetadataValue("string", default)))
        for name, default in (("model", "none"), ("pre", ""))
    )
    return {"tokens": len(tokens), "kind": str(kind), "pre": str(pre), "special": special}


def _display_value(value: MetadataValue) -> Any:
    """Convert a metadata value for print or JSON: long arrays become their length, long texts are cut."""
    content = value.value
    if isinstance(content, list | np.ndarray):
        if len(content) > MAX_ITEMS:
            return f"[{len(content)} {value.kind if value.kind != 'string' else 'strings'}]"
        return [_display_value(MetadataValue(value.kind, item)) for item in content]
    if isinstance(content, bytes):
        return content.decode(errors="replace")
    if isinstance(content, str) and len(content) > MAX_CHARS:
        return f"{content[:MAX_CHARS]}… ({len(content)} characters)"
    if isinstance(content, np.generic):
        content = content.item()
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)  # JSON has no NaN or infinity
    return float(str(np.float32(content))) if value.kind == "f32" else content
