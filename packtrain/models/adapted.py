"""A model with adapters beside it: `FILE[:SCALE]` names one, several of them are one low-rank addition to a graph."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from packtrain.errors import InputError
from packtrain.gguf import GGUF
from packtrain.models.adapter import Adapter, check_fits, read_adapter
from packtrain.models.file import ModelFile
from packtrain.models.lora import EMBEDDING, A, B, Lora

Scaled = tuple[Adapter, float]


def read_scaled(given: Iterable[str], base: GGUF) -> list[Scaled]:
    """Adapters and their scales from texts as FILE or FILE:SCALE. Raises InputError for one of another base."""
    found = []
    for text in given:
        path, _, number = text.rpartition(":")
        scale = None if Path(text).exists() else _number(number)
        if not path or scale is None:
            path, scale = text, 1.0
        adapter = read_adapter(path)
        check_fits(adapter, path, base)
        found.append((adapter, scale))
    return found


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if np.isfinite(number) else None


def adapted(model: ModelFile, adapters: Sequence[Scaled]) -> ModelFile:
    """The model with these additions in its graphs. Raises InputError for what only a merge can add."""
    touched = dict.fromkeys(name for adapter, _ in adapters for name in adapter.pairs)
    ranks, added = [], {}
    for name in touched:
        if not name.startswith("blk.") or model.gguf.array(name).ndim != 2:
            what = "the embedding" if name == EMBEDDING else name
            raise InputError(
                f"{model.gguf.path}: an adapter adds to {what}, which works merged only; use packtrain merge"
            )
        pairs = [
            (*adapter.pairs[name], by * adapter.scale(name))
            for adapter, by in adapters
            if name in adapter.pairs
        ]
        added[name + A] = np.concatenate([a for a, _, _ in pairs])
        added[name + B] = np.concatenate([np.float32(by) * b for _, b, by in pairs], axis=1)
        ranks.append((name, len(added[name + A])))
    lora = Lora(tuple(ranks)) if ranks else None
    return replace(model, config=replace(model.config, lora=lora), added=added)
