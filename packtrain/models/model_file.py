"""A model in a GGUF file: config, vocabulary and weights, checked against each other; memory-mapped; and saving one.

open_model(path) returns a ModelFile or raises a one-line error; save_model writes a file that llama.cpp loads.
It knows no sessions: weights are arrays by name.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from packtrain.common.errors import InputError
from packtrain.data.tokenizer import Tokenizer, TokenizerError
from packtrain.dtypes import DTYPES, READABLE, Dtype, bf16, f32
from packtrain.gguf import GGUF, Deferred, Value, write
from packtrain.kernels.quantized_arrays import dequantize
from packtrain.models import transformer
from packtrain.models.arch.architecture import is_matrix
from packtrain.models.config import Config
from packtrain.models.gguf_keys import Keys
from packtrain.models.model_metadata import metadata, read, unused_blocks
from packtrain.models.tensor_shapes import unread

PART = 1 << 18  # elements converted at a time
TOKENS = "tokenizer.ggml.tokens"
EDGE = 256  # bytes at the beginning and end of a tensor that go into the fingerprint
APART = 128  # by how many tokens the sizes of two vocabularies may differ, as in llama.cpp


@dataclass(frozen=True, slots=True)
class ModelFile:
    """An open, validated model file; weights stay in the file until they are read.

    added  values of LoRA adapters that are in the config but not in the file, see adapted
    """

    gguf: GGUF
    config: Config
    added: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all weights, in the order of the model."""
        return tuple(transformer.weights(self.config))

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the file. Raises InputError, with the file's name, if it cannot be used."""
        try:
            return Tokenizer(self.gguf.metadata)
        except TokenizerError as error:
            raise InputError(f"{self.gguf.path}: {error}") from None

    def weight(self, name: str) -> np.ndarray:
        """A weight as f32: mapped and read-only if the file has f32, else dequantized."""
        array = self.gguf.array(name)
        return array if array.dtype == np.float32 else dequantize(array)

    def stored(self) -> dict[str, np.ndarray]:
        """All weights by name as graphs read them: matrices mapped in the file's type; vectors as f32."""
        entries = self.gguf.entries.items()
        return {
            **{n: self.gguf.array(n) if len(e.shape) > 1 else self.weight(n) for n, e in entries},
            **self.added,
        }

    def types(self) -> dict[str, Dtype]:
        """The element types of the matrices."""
        return {name: e.dtype for name, e in self.gguf.entries.items() if len(e.shape) > 1}


# ---- reading -------------------------------------------------------------------------------------------------


def open_model(path: str | Path) -> ModelFile:
    """The model in a GGUF file. Raises InputError if packtrain cannot compute it as the file describes."""
    gguf = GGUF(path)
    if gguf.metadata.get("general.type") == "adapter":
        raise InputError(
            f"{path}: this is an adapter, not a model; give its base, and --lora {path}"
        )
    config = read(gguf)
    _check_vocabulary(gguf, config)
    _check_tensors(gguf, config)
    return ModelFile(gguf, config)


def fingerprint(model: ModelFile) -> str:
    """Identifies the model: names, types and shapes of its tensors, and the first and last bytes of each."""
    digest = hashlib.sha256()
    for name, e in model.gguf.entries.items():
        digest.update(f"{name} {e.dtype} {e.shape}\n".encode())
        raw = model.gguf.array(name).reshape(-1).view(np.uint8)
        digest.update(raw[:EDGE].tobytes() + raw[-EDGE:].tobytes())
    return digest.hexdigest()[:16]


def _check_vocabulary(gguf: GGUF, config: Config) -> None:
    tokens = gguf.metadata.get(TOKENS)
    if not isinstance(tokens, list):
        raise InputError(f"{gguf.path}: there is no array {TOKENS}; a model needs a vocabulary")
    if len(tokens) != config.vocab_size:
        raise InputError(
            f"{gguf.path}: {TOKENS} has {len(tokens)} tokens and token_embd.weight {config.vocab_size} rows;"
            " both must be equal"
        )
    keys = Keys(gguf)
    if keys.size("vocab_size", config.vocab_size) != config.vocab_size:
        right = f"{config.vocab_size}, the rows of token_embd.weight"
        raise keys.wrong("vocab_size", keys.get("vocab_size"), right)


def _check_tensors(gguf: GGUF, config: Config) -> None:
    """Check that the file has exactly the model's tensors, in their shapes and in readable types."""
    leaves = transformer.weights(config)
    count = min(unused_blocks(Keys(gguf)), len(gguf.entries))
    unused = (*(f"blk.{config.block_count + i}." for i in range(count)), *unread(config))
    unknown = [n for n in gguf.entries if n not in leaves and not n.startswith(unused)]
    if unknown:
        raise InputError(
            f"{gguf.path}: tensor {unknown[0]} is not part of a {config.architecture} of {config.block_count} blocks;"
            f" packtrain cannot use it ({len(unknown)} in total)"
        )
    for name, leaf in leaves.items():
        entry = gguf.entries.get(name)
        if entry is None:
            raise InputError(f"{gguf.path}: tensor {name} is missing; its shape is {[*leaf.shape]}")
        if entry.shape == (1, *leaf.shape):  # a matrix of one row is a vector
            entry = gguf.entries[name] = replace(entry, shape=leaf.shape)
        if entry.shape != leaf.shape:
            raise InputError(
                f"{gguf.path}: {name} has shape {[*entry.shape]}; by the metadata it must be {[*leaf.shape]}"
            )
        if entry.dtype not in READABLE:
            raise InputError(
                f"{gguf.path}: {name} is of type {entry.dtype}; only {', '.join(map(str, READABLE))} can be read"
            )


# ---- writing -------------------------------------------------------------------------------------------------


def save_model(
    path: str | Path,
    config: Config,
    vocabulary: Mapping[str, Value],
    weights: Callable[[str], np.ndarray],
    *,
    dtype: str = "f32",
    name: str,
    extra: Mapping[str, Value] = MappingProxyType({}),
) -> None:
    """Write a model that llama.cpp loads; weights(name) returns f32 arrays, called one by one.

    dtype       of the matrices: f32, f16 or bf16; vectors stay f32, as llama.cpp requires
    vocabulary  the tokenizer.* metadata
    """
    tokens = len(vocabulary[TOKENS].value)
    if tokens != config.vocab_size:
        raise InputError(
            f"{path}: the vocabulary has {tokens} tokens, the model {config.vocab_size}; both must be equal"
        )

    def deferred(tensor: str, shape: tuple[int, ...]) -> Deferred:
        stored = DTYPES[dtype] if is_matrix(tensor, shape) else f32
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
    """A weight as stored in the file, some rows at a time."""
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
    """f32 as bf16, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    upper = rounded.astype(np.uint16)
    upper[np.isnan(array)] = 0x7FC0
    return upper


def check_vocabularies(model: ModelFile, draft: ModelFile, subject: str = "a draft") -> None:
    """Raise InputError unless both have the same tokens."""
    model_tokens, draft_tokens = (file.gguf.metadata[TOKENS] for file in (model, draft))
    if abs(len(model_tokens) - len(draft_tokens)) > APART:
        raise InputError(
            f"{draft.gguf.path}: its vocabulary has {len(draft_tokens):,} tokens and"
            f" that of {model.gguf.path} {len(model_tokens):,};"
            f" {subject} needs the same vocabulary"
        )
    for id, (a, b) in enumerate(zip(model_tokens, draft_tokens, strict=False)):
        if a != b:
            raise InputError(
                f"{draft.gguf.path}: token {id} is {b!r}, and in {model.gguf.path} {a!r}; {subject} needs the same"
                " vocabulary"
            )
