"""packtrain inspect: what is in a GGUF file, of any architecture, with or without tensors."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.gguf import GGUF, Value
from packtrain.settings import option, positional
from packtrain.tokenizer import KEYS, NO_ID

FEW, LONG = 8, 100  # values of an array, characters of a text, that are shown
TOKENS, ID = f"{KEYS}tokens", "_token_id"


@dataclass(frozen=True)
class Inspect:
    """Show what is in a GGUF file."""

    model: Path = positional("a GGUF file")
    tensors: bool = option(False, "list all tensors: name, shape in NumPy order, type, bytes")
    json: bool = option(False, "print JSON")


def run(settings: Inspect) -> int:
    """Print the file's description. Raises InputError for a file that is no sound GGUF."""
    found = describe(GGUF(settings.model))
    if not settings.tensors:
        del found["tensors"]
    if settings.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        print("\n".join(lines(found)))
    return 0


def describe(gguf: GGUF) -> dict[str, Any]:
    """The file as plain data: what --json prints."""
    entries = gguf.entries.values()
    types = Counter(str(e.dtype) for e in entries)
    return {
        "file": str(gguf.path),
        "file_bytes": gguf.nbytes,
        "architecture": _shown(gguf.values.get("general.architecture", Value("string", "unknown"))),
        "parameters": sum(math.prod(e.shape) for e in entries),
        "types": dict(types.most_common()),
        "vocabulary": _vocabulary(gguf),
        "metadata": {key: _shown(value) for key, value in gguf.values.items()},
        "tensors": [
            {"name": e.name, "shape": list(e.shape), "type": str(e.dtype), "bytes": e.nbytes}
            for e in entries
        ],
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The description as text."""
    types = ", ".join(f"{count} {name}" for name, count in found["types"].items()) or "none"
    vocabulary = found["vocabulary"]
    yield f"file          {found['file']}"
    yield f"size          {found['file_bytes']:,} bytes"
    yield f"architecture  {found['architecture']}"
    yield f"parameters    {found['parameters']:,}"
    yield f"tensors       {types}"
    yield f"vocabulary    {vocabulary['tokens']:,} tokens, kind {vocabulary['kind']}"
    for name, token in vocabulary["special"].items():
        yield f"  {name:12}{token['id']} {token['text']}"
    yield "metadata"
    for key, value in found["metadata"].items():
        yield f"  {key} = {value}".replace("\n", "\\n")
    for tensor in found.get("tensors", ()):
        shape = str(tensor["shape"])
        yield f"{tensor['name']:32} {shape:>16} {tensor['type']:>6} {tensor['bytes']:>14,} bytes"


def _vocabulary(gguf: GGUF) -> dict[str, Any]:
    """Number of tokens, kind, and the tokens that have a role."""
    listed = gguf.metadata.get(TOKENS)
    tokens = listed if isinstance(listed, list) else []
    special = {}
    for key, id in gguf.metadata.items():
        if key.startswith(KEYS) and key.endswith(ID) and isinstance(id, int) and id != NO_ID:
            text = tokens[id].decode(errors="replace") if 0 <= id < len(tokens) else None
            special[key.removeprefix(KEYS).removesuffix(ID)] = {"id": id, "text": text}
    kind = _shown(gguf.values.get(f"{KEYS}model", Value("string", "none")))
    return {"tokens": len(tokens), "kind": kind, "special": special}


def _shown(value: Value) -> Any:
    """A metadata value for people and JSON: long arrays as their number, long texts cut."""
    given = value.value
    if isinstance(given, list | np.ndarray):
        if len(given) > FEW:
            return f"[{len(given)} {value.kind if value.kind != 'string' else 'strings'}]"
        return [_shown(Value(value.kind, one)) for one in given]
    if isinstance(given, bytes):
        return given.decode(errors="replace")
    if isinstance(given, str) and len(given) > LONG:
        return f"{given[:LONG]}… ({len(given)} characters)"
    if isinstance(given, np.generic):
        given = given.item()
    if isinstance(given, float) and not math.isfinite(given):
        return str(given)  # JSON has no such numbers
    return float(str(np.float32(given))) if value.kind == "f32" else given
