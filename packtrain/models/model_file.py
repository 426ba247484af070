"""A model in a GGUF file: config, vocabulary and weights, checked against each other; memory-mapped; and saving one.

open_model(path) returns a ModelFile or raises a one-line error; save_model writes a file that llama.cpp loads.
A ModelFile knows no sessions: weights are arrays by name."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from packtrain.common.errors import InputError
from packtrain.data.tokenizer import Tokenizer, TokenizerError
from packtrain.dtypes import DTYPES, READABLE, Dtype, bf16, f32
from packtrain.gguf import GGUF, DeferredTensor, MetadataValue, write_gguf
from packtrain.kernels.quant.quantized_arrays import dequantize
from packtrain.models import transformer
from packtrain.models.arch.architecture import is_matrix
from packtrain.models.config import Config
from packtrain.models.gguf_keys import MetadataReader
from packtrain.models.model_metadata import model_metadata, num_unused_blocks, read_config
from packtrain.models.tensor_shapes import unused_weights

CHUNK_ELEMENTS = 1 << 18  # elements converted at a time
RERANK_HEAD = "cls.output.weight"  # classifier of rerankers
TOKENS_KEY = "tokenizer.ggml.tokens"
EDGE_NBYTES = 256  # bytes at the beginning and end of a tensor that go into the fingerprint
MAX_VOCAB_DIFFERENCE = 128  # tokens by which two vocabularies may differ in size: llama.cpp's


@dataclass(frozen=True, slots=True)
class ModelFile:
    """An open, validated model file; weights stay in the file until they are read.

    adapter_values  values of LoRA adapters in the config that are not in the file, see model_with_adapters.adapted
    """

    gguf: GGUF
    config: Config
    adapter_values: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def weight_names(self) -> tuple[str, ...]:
        """Return the names of all weights, in the order of the model."""
        return tuple(transformer.weights(self.config))

    def tokenizer(self) -> Tokenizer:
        """Build the file's tokenizer. Raises InputError, with the file's name, if it cannot be used."""
        try:
            return Tokenizer(self.gguf.metadata)
        except TokenizerError as error:
            raise InputError(f"{self.gguf.path}: {error}") from None

    def weight(self, name: str) -> np.ndarray:
        """Return a weight as f32: mapped and read-only if the file has f32, else dequantized."""
        array = self.gguf.array(name)
        return array if array.dtype == np.float32 else dequantize(array)

    def stored(self) -> dict[str, np.ndarray]:
        """Return all weights by name as graphs read them: matrices mapped in the file's type, vectors as f32."""
        entries = self.gguf.entries.items()
        return {
            **{n: self.gguf.array(n) if len(e.shape) > 1 else self.weight(n) for n, e in entries},
            **self.adapter_values,
        }

    def matrix_dtypes(self) -> dict[str, Dtype]:
        """Return the element types of the matrices."""
        return {name: info.dtype for name, info in self.gguf.entries.items() if len(info.shape) > 1}


# ---- reading -------------------------------------------------------------------------------------------------


def open_model(path: str | Path, extra_tensors: Sequence[str] = ()) -> ModelFile:
    """Open a model's GGUF file, which may have `extra_tensors`. Raises InputError if it cannot be computed."""
    gguf = GGUF(path)
    if gguf.metadata.get("general.type") == "adapter":
        fact = f"{path}: this is an adapter, not a model; give its base, and --lora {path}"
        raise InputError(fact)
    config = read_config(gguf)
    _check_vocabulary(gguf, config)
    check_tensors(gguf, config, extra_tensors)
    return ModelFile(gguf, config)


def fingerprint(model: ModelFile) -> str:
    """Return 16 hex digits: a hash of tensors' names, types, shapes, and first and last EDGE_NBYTES bytes."""
    digest = hashlib.sha256()
    for name, info in model.gguf.entries.items():
        digest.update(f"{name} {info.dtype} {info.shape}\n".encode())
        tensor_bytes = model.gguf.array(name).reshape(-1).view(np.uint8)
        digest.update(tensor_bytes[:EDGE_NBYTES].tobytes() + tensor_bytes[-EDGE_NBYTES:].tobytes())
    return digest.hexdigest()[:16]


def _check_vocabulary(gguf: GGUF, config: Config) -> None:
    tokens = gguf.metadata.get(TOKENS_KEY)
    if not isinstance(tokens, list):
        raise InputError(f"{gguf.path}: there is no array {TOKENS_KEY}; a model needs a vocabulary")
    if len(tokens) != config.vocab_size:
        raise InputError(
            f"{gguf.path}: {TOKENS_KEY} has {len(tokens)} tokens and token_embd.weight {config.vocab_size} rows;"
            " both must be equal"
        )
    reader = MetadataReader(gguf)
    if reader.size("vocab_size", config.vocab_size) != config.vocab_size:
        expected = f"{config.vocab_size}, the rows of token_embd.weight"
        raise reader.wrong("vocab_size", reader.get("vocab_size"), expected)


def check_tensors(gguf: GGUF, config: Config, extra_tensors: Sequence[str] = ()) -> None:
    """Raise InputError for missing, unreadable or unknown tensors, not extra ones; vectors (1, N) become (N,)."""
    leaves = transformer.weights(config)
    count = min(num_unused_blocks(MetadataReader(gguf)), len(gguf.entries))
    unused_blocks = (f"blk.{config.block_count + i}." for i in range(count))
    unused = *unused_blocks, *unused_weights(config), *extra_tensors
    unknown = [n for n in gguf.entries if n not in leaves and not n.startswith(unused)]
    if unknown:
        if unknown[0].startswith("optimizer."):
            raise InputError(
                f"{gguf.path}: this is a training checkpoint, not a model; packtrain train --from {gguf.path} goes on"
                " from its weights"
            )
        raise InputError(
            f"{gguf.path}: tensor {unknown[0]} is not part of a {config.architecture} of {config.block_count} blocks;"
            f" packtrain cannot use it ({len(unknown)} in total)"
        )
    for name, leaf in leaves.items():
        tensor_info = gguf.entries.get(name)
        if tensor_info is None:
            raise InputError(f"{gguf.path}: tensor {name} is missing; its shape is {[*leaf.shape]}")
        if tensor_info.shape == (1, *leaf.shape):  # a matrix of one row is a vector
            tensor_info = gguf.entries[name] = replace(tensor_info, shape=leaf.shape)
        if tensor_info.shape != leaf.shape:
            fact = f"{gguf.path}: {name} has shape {[*tensor_info.shape]}"
            raise InputError(f"{fact}; by the metadata it must be {[*leaf.shape]}")
        if tensor_info.dtype not in READABLE:
            fact = f"{gguf.path}: {name} is of type {tensor_info.dtype}"
            raise InputError(f"{fact}; only {', '.join(map(str, READABLE))} can be read")


# ---- writing -------------------------------------------------------------------------------------------------


def save_model(
    path: str | Path, config: Config, vocabulary: Mapping[str, MetadataValue],
    read_weight: Callable[[str], np.ndarray], *,
    dtype: str = "f32", name: str, extra: Mapping[str, MetadataValue] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Write a model that llama.cpp loads; read_weight(name) returns f32. Raises InputError for values beyond `dtype`.

    dtype       element type of the matrices: f32, f16 or bf16; vectors stay f32, as llama.cpp requires
    vocabulary  the tokenizer.* metadata
    name        the model's name in the metadata, to which `extra` adds keys
    """
    num_tokens = len(vocabulary[TOKENS_KEY].value)
    if num_tokens != config.vocab_size:
        fact = f"{path}: the vocabulary has {num_tokens} tokens, the model {config.vocab_size}"
        raise InputError(f"{fact}; both must be equal")

    def defer_tensor(tensor: str, shape: tuple[int, ...]) -> DeferredTensor:
        stored = DTYPES[dtype] if is_matrix(tensor, shape) else f32
        return DeferredTensor(
            stored, shape, lambda: _stored_chunks(path, tensor, read_weight(tensor), shape, stored)
        )

    leaves = transformer.weights(config).values()
    tensors = {leaf.label: defer_tensor(leaf.label, leaf.shape) for leaf in leaves}
    write_gguf(path, {**model_metadata(config, name, dtype), **vocabulary, **extra}, tensors)


def _stored_chunks(
    path: str | Path, name: str, array: np.ndarray, shape: tuple[int, ...], dtype: Dtype
) -> Iterator[np.ndarray]:
    """Yield the f32 `array` of weight `name` in its stored type, some elements at a time; checks its shape."""
    if array.shape != shape or array.dtype != np.float32:
        raise ValueError(f"{name}: {array.dtype}{[*array.shape]} was given for f32{[*shape]}")
    flat = array.reshape(-1)
    for chunk_start in range(0, flat.size, CHUNK_ELEMENTS):
        yield _convert_array(path, name, flat[chunk_start : chunk_start + CHUNK_ELEMENTS], dtype)


def _convert_array(path: str | Path, name: str, array: np.ndarray, dtype: Dtype) -> np.ndarray:
    if dtype is bf16:
        # rounded to nearest, ties to even; NaN stays NaN
        bits = np.ascontiguousarray(array).view(np.uint32)
        rounded = bits >> 16
        rounded &= 1
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        upper = rounded.astype(np.uint16)
        upper[np.isnan(array)] = 0x7FC0
        return upper
    try:
        with np.errstate(over="raise"):
            return array.astype(dtype.numpy, copy=False)
    except FloatingPointError:
        largest = float(np.abs(array).max())
        fact = f"{path}: {name} has values up to {largest:.3g}, beyond {dtype}; write bf16 or f32"
        raise InputError(fact) from None


def check_vocabularies(model: ModelFile, draft: ModelFile, subject: str = "a draft") -> None:
    """Raise InputError, which calls the second model `subject`, unless one has the other's tokens, and few more."""
    model_tokens, draft_tokens = (file.gguf.metadata[TOKENS_KEY] for file in (model, draft))
    if abs(len(model_tokens) - len(draft_tokens)) > MAX_VOCAB_DIFFERENCE:
        raise InputError(
            f"{draft.gguf.path}: its vocabulary has {len(draft_tokens):,} tokens and that of {model.gguf.path}"
            f" {len(model_tokens):,}; {subject} needs the same vocabulary"
        )
    for id, (a, b) in enumerate(zip(model_tokens, draft_tokens, strict=False)):
        if a != b:
            raise InputError(
                f"{draft.gguf.path}: token {id} is {b!r}, and in {model.gguf.path} {a!r}; {subject} needs the same"
                " vocabulary"
            )
