"""A model as a run uses it: with unmerged LoRA adapters, given as `FILE[:SCALE]`, and with rounded activations."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from packtrain.common.errors import InputError
from packtrain.dtypes import ROUNDABLE
from packtrain.gguf import GGUF
from packtrain.models.activation_rounding import Q8
from packtrain.models.adapter_file import Adapter, fitted, read_adapter
from packtrain.models.arch import ARCHITECTURES
from packtrain.models.lora import EMBEDDING, A, B, Lora
from packtrain.models.model_file import ModelFile

MOST = 1e6  # with a larger scale, sums are no longer finite
Scaled = tuple[Adapter, float]


def split_scale(text: str) -> tuple[Path, float]:
    """Parse FILE:SCALE or FILE, whose scale is 1. Raises InputError for a bad scale."""
    path, _, number = text.rpartition(":")
    if not path or Path(text).exists():
        return Path(text), 1.0
    try:
        scale = float(number)
    except ValueError:
        return Path(text), 1.0
    if not abs(scale) <= MOST:  # nan, too
        raise InputError(f"{text}: the scale is {number}; it must be from -{MOST:g} to {MOST:g}")
    return Path(path), scale


def read_scaled(specs: Iterable[str], base: GGUF) -> list[Scaled]:
    """Adapters and their scales from texts FILE[:SCALE]. Raises InputError if one does not fit the base."""
    adapters = []
    for path, scale in map(split_scale, specs):
        adapters.append((fitted(read_adapter(path), path, base), scale))
    return adapters


def merged_only(adapter: Adapter) -> list[str]:
    """Names within blocks of the matrices whose parts of an adapter llama.cpp leaves out beside the base."""
    candidates = ARCHITECTURES[adapter.architecture].merged_only
    adapted_names = dict.fromkeys(name.split(".")[-2] for name in adapter.pairs)
    return [name for name in candidates if name in adapted_names]


@np.errstate(over="ignore", invalid="ignore")
def adapted(
    model: ModelFile, adapters: Sequence[Scaled], *, by_token: bool = False, aware: bool = False
) -> ModelFile:
    """The model with these adapters in its graphs. Raises InputError for adapters that only work merged.

    aware     an adapter of aware training as its merge will store it, not exactly
    by_token  each token has its own scale for each adapter, instead of those given: see kv_cache.adapters
    """
    touched = dict.fromkeys(name for adapter, _ in adapters for name in adapter.pairs)
    ranks, added, owners = [], {}, []
    for name in touched:
        _check_unmerged(model, name, by_token)
        numbered_adapters = [
            (n, *scaled) for n, scaled in enumerate(adapters) if name in scaled[0].pairs
        ]
        pairs = [adapter.pairs[name] for _, adapter, _ in numbered_adapters]
        scales = [
            np.float32((1 if by_token else by) * scaled_adapter.scale(name))
            for _, scaled_adapter, by in numbered_adapters
        ]
        inner = -1 if name == EMBEDDING else -2  # the axis of A that is the rank
        added[name + A] = np.concatenate([a for a, _ in pairs], axis=inner)
        scaled = [by * b for by, (_, b) in zip(scales, pairs, strict=True)]
        added[name + B] = np.concatenate(scaled, axis=-1)
        if not np.isfinite(added[name + B]).all():
            raise InputError(f"{name}: the adapter's values, or its scale, are too large")
        ranks.append((name, added[name + B].shape[-1]))
        rows = [b.shape[-1] for _, b in pairs]
        owners.append((name, tuple(np.repeat([n for n, *_ in numbered_adapters], rows).tolist())))
    token_owners = tuple(owners) if by_token else ()
    lora = Lora(tuple(ranks), owners=token_owners, aware=aware) if ranks else None
    return replace(model, config=replace(model.config, lora=lora), added=added)


def _check_unmerged(model: ModelFile, name: str, by_token: bool) -> None:
    """Unmerged adapters work for matrices of the blocks, and for an embedding that is not also the output head."""
    config, axes = model.config, len(model.gguf.entries[name].shape)
    in_block = name.startswith("blk.") and axes > 1
    if not in_block and (name != EMBEDDING or config.tied):
        raise InputError(
            f"{model.gguf.path}: an adapter changes {name}, which only works merged; use packtrain merge"
        )
    if by_token and (axes > 2 or (model.config.expert_count and "gate_inp" in name)):
        raise InputError(
            f"{model.gguf.path}: an adapter changes the experts {name}, whose scale requests cannot choose; use"
            " packtrain merge"
        )


def has_rounded(model: ModelFile) -> bool:
    """Whether rounded activations change anything."""
    return bool(set(model.types().values()) & set(ROUNDABLE))


def with_activations(model: ModelFile, kind: str) -> ModelFile:
    """The model with f32 or q8 activations. Raises InputError if that changes nothing."""
    if kind == Q8 and not has_rounded(model):
        fits = ", ".join(t.name for t in ROUNDABLE)
        raise InputError(f"--activations q8: {model.gguf.path} has no matrix of {fits}")
    return replace(model, config=replace(model.config, activations=kind))
