"""A model as a run uses it: with unmerged LoRA adapters, given as `FILE[:SCALE]`, and with rounded activations."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from packtrain.common.errors import InputError
from packtrain.dtypes import ROUNDABLE
from packtrain.gguf import GGUF
from packtrain.models.activation_rounding import F32, Q8
from packtrain.models.adapter_file import Adapter, fit_adapter, read_adapter
from packtrain.models.arch import ARCHITECTURES
from packtrain.models.attention_choice import AUTO
from packtrain.models.lora import EMBEDDING, A, B, Lora
from packtrain.models.model_file import ModelFile

MAX_SCALE = 1e6  # with a larger scale, sums are no longer finite
Scaled = tuple[Adapter, float]


def split_scale(text: str) -> tuple[Path, float]:
    """Parse FILE:SCALE or FILE, whose scale is 1, to (file, scale). Raises InputError for a bad scale."""
    path, _, scale_text = text.rpartition(":")
    if not path or Path(text).exists():
        return Path(text), 1.0
    try:
        scale = float(scale_text)
    except ValueError:
        return Path(text), 1.0
    if not abs(scale) <= MAX_SCALE:  # nan, too
        fact = f"{text}: the scale is {scale_text}; it must be from -{MAX_SCALE:g} to {MAX_SCALE:g}"
        raise InputError(fact)
    return Path(path), scale


def read_scaled(specs: Iterable[str], base: GGUF) -> list[Scaled]:
    """Read adapters and their scales from texts FILE[:SCALE]. Raises InputError if one does not fit the base."""
    adapters = []
    for path, scale in map(split_scale, specs):
        adapters.append((fit_adapter(read_adapter(path), path, base), scale))
    return adapters


def merge_only_weights(adapter: Adapter) -> list[str]:
    """Return names within blocks, such as attn_q, of adapted matrices that llama.cpp applies only when merged."""
    merge_only_names = ARCHITECTURES[adapter.architecture].merge_only_weights
    adapted_names = dict.fromkeys(name.split(".")[-2] for name in adapter.lora_pairs)
    return [name for name in merge_only_names if name in adapted_names]


@np.errstate(over="ignore", invalid="ignore")
def adapted(
    model: ModelFile, adapters: Sequence[Scaled], *, by_token: bool = False, aware: bool = False
) -> ModelFile:
    """Return the model with these adapters in its graphs. Raises InputError for adapters that only work merged.

    aware     compute with an aware-trained adapter as its merge will store it, not exactly
    by_token  each token has its own scale for each adapter, instead of the given scales: see kv_cache.adapters
    """
    adapted_names = dict.fromkeys(name for adapter, _ in adapters for name in adapter.lora_pairs)
    ranks, adapter_values, owners = [], {}, []
    for name in adapted_names:
        _check_unmerged(model, name, by_token)
        numbered = [(n, *b) for n, b in enumerate(adapters) if name in b[0].lora_pairs]
        lora_pairs = [adapter.lora_pairs[name] for _, adapter, _ in numbered]
        scales = [np.float32((1 if by_token else s) * a.scale_of(name)) for _, a, s in numbered]
        rank_axis = -1 if name == EMBEDDING else -2  # the axis of A that is the rank
        adapter_values[name + A] = np.concatenate([a for a, _ in lora_pairs], axis=rank_axis)
        scaled_b = [scale * b for scale, (_, b) in zip(scales, lora_pairs, strict=True)]
        adapter_values[name + B] = np.concatenate(scaled_b, axis=-1)
        if not np.isfinite(adapter_values[name + B]).all():
            raise InputError(f"{name}: the adapter's values, or its scale, are too large")
        ranks.append((name, adapter_values[name + B].shape[-1]))
        rows = [b.shape[-1] for _, b in lora_pairs]
        owners.append((name, tuple(np.repeat([n for n, *_ in numbered], rows).tolist())))
    token_owners = tuple(owners) if by_token else ()
    lora = Lora(tuple(ranks), owners=token_owners, aware=aware) if ranks else None
    return replace(model, config=replace(model.config, lora=lora), adapter_values=adapter_values)


def _check_unmerged(model: ModelFile, name: str, by_token: bool) -> None:
    """Raise InputError unless a tensor's adapter works unmerged: in blocks' matrices (`by_token`, with a scale for each
    token: not in experts or their router), and in an untied embedding."""
    config, num_axes = model.config, len(model.gguf.entries[name].shape)
    in_block = name.startswith("blk.") and num_axes > 1
    if not in_block and (name != EMBEDDING or config.tied):
        fact = f"{model.gguf.path}: an adapter changes {name}, which only works merged"
        raise InputError(f"{fact}; use packtrain merge")
    if by_token and (num_axes > 2 or (model.config.expert_count and "gate_inp" in name)):
        raise InputError(
            f"{model.gguf.path}: an adapter changes the experts {name}, whose scale requests cannot choose; use"
            " packtrain merge"
        )


def has_roundable_weights(model: ModelFile) -> bool:
    """Whether rounding activations changes anything: whether the model has quantized matrices that allow it."""
    return bool(set(model.matrix_dtypes().values()) & set(ROUNDABLE))


def with_activations(model: ModelFile, activations: str) -> ModelFile:
    """Return the model with f32, q8 or auto activations. Raises InputError if q8 changes nothing."""
    if activations == AUTO:
        activations = Q8 if has_roundable_weights(model) else F32
    if activations == Q8 and not has_roundable_weights(model):
        roundable_names = ", ".join(dtype.name for dtype in ROUNDABLE)
        raise InputError(f"--activations q8: {model.gguf.path} has no matrix of {roundable_names}")
    return replace(model, config=replace(model.config, activations=activations))
