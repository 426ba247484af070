"""A llama in a GGUF file: config, vocabulary and weights, checked against each other; read by mapping, written whole.

open_model(path) gives a ModelFile or says in one line what is not right; save_model writes what llama.cpp loads.
It knows no sessions: weights come and go as arrays by name.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from packtrain.dtypes import DTYPES, Dtype, bf16, f32
from packtrain.errors import InputError
from packtrain.gguf import GGUF, Deferred, Entry, Value, write
from packtrain.models import transformer
from packtrain.quant import READABLE, dequantize
from packtrain.tokenizer import Tokenizer, TokenizerError

PART = 1 << 18  # elements that are converted at a time
ARCHITECTURE = "llama"
TOKENS = "tokenizer.ggml.tokens"
FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32}  # llama.h, enum llama_ftype
QUANTIZATION_VERSION = 2  # ggml.h, GGML_QNT_VERSION
ROPE_FREQ_BASE = 10_000.0  # where a file does not say
MOST = 2**31 - 1  # ids, positions and sizes are i32
# keys that change the computation, and the values with which they do not
NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "rope.scaling.type": ("none",),
        "rope.scale_linear": (1.0,),
        "expert_count": (0,),
        "attention.scale": (0.0,),
        "attention.causal": (True,),
    }
)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """An open model file that is known to be sound; weights stay in the file until they are asked for."""

    gguf: GGUF
    config: transformer.Config

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all weights, in the order of the model."""
        return tuple(transformer.weights(self.config))

    def tokenizer(self) -> Tokenizer:
        """The vocabulary of the file. Raises InputError, with its name, for one that cannot be used."""
        try:
            return Tokenizer(self.gguf.metadata)
        except TokenizerError as error:
            raise InputError(f"{self.gguf.path}: {error}") from None

    def weight(self, name: str) -> np.ndarray:
        """A weight as f32: mapped, read-only, where the file has f32; else unpacked."""
        array = self.gguf.array(name)
        return array if array.dtype == np.float32 else dequantize(array)

    def stored(self) -> dict[str, np.ndarray]:
        """All weights by name as graphs read them: matrices in the type of the file, mapped; vectors as f32."""
        return {
            name: self.gguf.array(name) if len(entry.shape) > 1 else self.weight(name)
            for name, entry in self.gguf.entries.items()
        }

    def types(self) -> dict[str, Dtype]:
        """The element types of the matrices."""
        return {name: e.dtype for name, e in self.gguf.entries.items() if len(e.shape) > 1}


# ---- reading -------------------------------------------------------------------------------------------------


def open_model(path: str | Path) -> ModelFile:
    """The model in a GGUF file. Raises InputError for all that could not be computed with as the file says."""
    gguf = GGUF(path)
    config = _config(gguf)
    _check_vocabulary(gguf, config)
    _check_tensors(gguf, config)
    return ModelFile(gguf, config)


def _config(gguf: GGUF) -> transformer.Config:
    found = gguf.metadata.get("general.architecture")
    if found != ARCHITECTURE:
        raise InputError(
            f"{gguf.path}: general.architecture is {found!r}; only {ARCHITECTURE!r} is supported"
        )
    _check_neutral(gguf)
    heads = _size(gguf, "attention.head_count")
    config = transformer.Config(
        vocab_size=_embedding(gguf).shape[0],
        context_length=_size(gguf, "context_length"),
        embedding_length=_size(gguf, "embedding_length"),
        block_count=_size(gguf, "block_count"),
        feed_forward_length=_size(gguf, "feed_forward_length"),
        head_count=heads,
        head_count_kv=_size(gguf, "attention.head_count_kv", heads),
        rope_freq_base=_real(gguf, "rope.freq_base", ROPE_FREQ_BASE),
        rms_eps=_real(gguf, "attention.layer_norm_rms_epsilon"),
        tied="output.weight" not in gguf.entries,
    )
    _check_heads(gguf, config)
    return config


def _wrong(gguf: GGUF, key: str, value: Any, right: str) -> InputError:
    shown = "missing" if value is None else " ".join(repr(value).split())[:80]
    return InputError(f"{gguf.path}: {ARCHITECTURE}.{key} is {shown}; it must be {right}")


def _size(gguf: GGUF, key: str, default: int | None = None) -> int:
    value = gguf.metadata.get(f"{ARCHITECTURE}.{key}", default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST:
        raise _wrong(gguf, key, value, f"a whole number from 1 to {MOST}")
    return value


def _real(gguf: GGUF, key: str, default: float | None = None) -> float:
    value = gguf.metadata.get(f"{ARCHITECTURE}.{key}", default)
    if not isinstance(value, float) or not 0 < value < math.inf:
        raise _wrong(gguf, key, value, "a number above 0")
    return float(str(np.float32(value)))  # 1e-05 as it was meant, not the f32 nearest to it


def _check_neutral(gguf: GGUF) -> None:
    for key, allowed in NEUTRAL.items():
        value = gguf.metadata.get(f"{ARCHITECTURE}.{key}", allowed[0])
        if isinstance(value, np.ndarray | list) or value not in allowed:
            raise _wrong(gguf, key, value, f"{allowed[0]!r} or left out: others are not supported")


def _check_heads(gguf: GGUF, config: transformer.Config) -> None:
    width, heads, kv = config.embedding_length, config.head_count, config.head_count_kv
    if width % (2 * heads):
        right = f"a divisor of half of {ARCHITECTURE}.embedding_length {width}, so that heads have an even width"
        raise _wrong(gguf, "attention.head_count", heads, right)
    if heads % kv:
        right = f"a divisor of {ARCHITECTURE}.attention.head_count {heads}"
        raise _wrong(gguf, "attention.head_count_kv", kv, right)
    for key in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        if _size(gguf, key, config.head_width) != config.head_width:
            value = gguf.metadata[f"{ARCHITECTURE}.{key}"]
            right = f"the head width, embedding_length / head_count = {config.head_width}"
            raise _wrong(gguf, key, value, right)


def _embedding(gguf: GGUF) -> Entry:
    entry = gguf.entries.get("token_embd.weight")
    if entry is None:
        raise InputError(
            f"{gguf.path}: there is no tensor token_embd.weight; a model needs its weights"
        )
    if len(entry.shape) != 2 or not 0 < entry.shape[0] <= MOST:
        raise InputError(
            f"{gguf.path}: token_embd.weight has shape {list(entry.shape)}; it must be [vocabulary, width]"
        )
    return entry


def _check_vocabulary(gguf: GGUF, config: transformer.Config) -> None:
    tokens = gguf.metadata.get(TOKENS)
    if not isinstance(tokens, list):
        raise InputError(f"{gguf.path}: there is no array {TOKENS}; a model needs its vocabulary")
    if len(tokens) != config.vocab_size:
        raise InputError(
            f"{gguf.path}: {TOKENS} has {len(tokens)} tokens and token_embd.weight {config.vocab_size} rows;"
            " both must be equal"
        )
    if _size(gguf, "vocab_size", config.vocab_size) != config.vocab_size:
        value = gguf.metadata[f"{ARCHITECTURE}.vocab_size"]
        raise _wrong(
            gguf, "vocab_size", value, f"{config.vocab_size}, the rows of token_embd.weight"
        )


def _check_tensors(gguf: GGUF, config: transformer.Config) -> None:
    """Exactly the tensors of the model, in their shapes and in types that can be read."""
    if config.block_count > len(gguf.entries):  # before so many blocks are listed
        right = f"less than the number of tensors, {len(gguf.entries)}"
        raise _wrong(gguf, "block_count", config.block_count, right)
    leaves = transformer.weights(config)
    unknown = [name for name in gguf.entries if name not in leaves]
    if unknown:
        raise InputError(
            f"{gguf.path}: tensor {unknown[0]} is no part of a {ARCHITECTURE} of {config.block_count} blocks;"
            f" nothing here computes with it ({len(unknown)} such tensors)"
        )
    for name, leaf in leaves.items():
        entry = gguf.entries.get(name)
        if entry is None:
            raise InputError(f"{gguf.path}: tensor {name} is missing; its shape is {[*leaf.shape]}")
        if entry.shape != leaf.shape:
            raise InputError(
                f"{gguf.path}: {name} has shape {[*entry.shape]}; by the metadata it must be {[*leaf.shape]}"
            )
        if entry.dtype not in READABLE:
            raise InputError(
                f"{gguf.path}: {name} is of type {entry.dtype}; only {', '.join(map(str, READABLE))} can be read"
            )


# ---- writing -------------------------------------------------------------------------------------------------


def metadata(config: transformer.Config, name: str, dtype: str = "f32") -> dict[str, Value]:
    """The general.* and llama.* keys of a model file whose matrices are of `dtype`."""
    sizes = {
        "vocab_size": config.vocab_size,
        "context_length": config.context_length,
        "embedding_length": config.embedding_length,
        "block_count": config.block_count,
        "feed_forward_length": config.feed_forward_length,
        "attention.head_count": config.head_count,
        "attention.head_count_kv": config.head_count_kv,
        "rope.dimension_count": config.head_width,
    }
    reals = {
        "rope.freq_base": config.rope_freq_base,
        "attention.layer_norm_rms_epsilon": config.rms_eps,
    }
    return {
        "general.architecture": Value("string", ARCHITECTURE),
        "general.type": Value("string", "model"),
        "general.name": Value("string", name),
        "general.file_type": Value("u32", FILE_TYPES[dtype]),
        "general.quantization_version": Value("u32", QUANTIZATION_VERSION),
        **{f"{ARCHITECTURE}.{key}": Value("u32", size) for key, size in sizes.items()},
        **{f"{ARCHITECTURE}.{key}": Value("f32", real) for key, real in reals.items()},
    }


def save_model(
    path: str | Path,
    config: transformer.Config,
    vocabulary: Mapping[str, Value],
    weights: Callable[[str], np.ndarray],
    *,
    dtype: str = "f32",
    name: str,
    extra: Mapping[str, Value] = MappingProxyType({}),
) -> None:
    """Write a model that llama.cpp loads; weights(name) is asked for one f32 array after the other.

    dtype       of the matrices: f32, f16 or bf16; vectors stay f32, llama.cpp takes no others
    vocabulary  the tokenizer.* metadata
    """
    tokens = len(vocabulary[TOKENS].value)
    if tokens != config.vocab_size:
        raise InputError(
            f"{path}: the vocabulary has {tokens} tokens, the model {config.vocab_size}; both must be equal"
        )

    def deferred(tensor: str, shape: tuple[int, ...]) -> Deferred:
        stored = DTYPES[dtype] if len(shape) > 1 else f32
        return Deferred(
            stored, shape, lambda: _stored(path, tensor, weights(tensor), shape, stored)
        )

    tensors = {
        leaf.label: deferred(leaf.label, leaf.shape)
        for leaf in transformer.weights(config).values()
    }
    write(path, {**metadata(config, name, dtype), **vocabulary, **extra}, tensors)


def _stored(
    path: str | Path, name: str, array: np.ndarray, shape: tuple[int, ...], dtype: Dtype
) -> Iterator[np.ndarray]:
    """A weight as it stands in the file, some rows at a time."""
    if array.shape != shape or array.dtype != np.float32:
        raise ValueError(f"{name}: {array.dtype}{[*array.shape]} was given for f32{[*shape]}")
    flat = array.reshape(-1)
    for start in range(0, flat.size, PART):
        yield _converted(path, name, flat[start : start + PART], dtype)


def _converted(path: str | Path, name: str, array: np.ndarray, dtype: Dtype) -> np.ndarray:
    if dtype is bf16:
        return _rounded_to_bf16(array)
    try:
        with np.errstate(over="raise"):
            return array.astype(dtype.numpy, copy=False)
    except FloatingPointError:
        largest = float(np.abs(array).max())
        raise InputError(
            f"{path}: {name} has values up to {largest:.3g}, beyond {dtype}; write bf16 or f32"
        ) from None


def _rounded_to_bf16(array: np.ndarray) -> np.ndarray:
    """The upper halves of f32, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    upper = rounded.astype(np.uint16)
    upper[np.isnan(array)] = 0x7FC0
    return upper
