"""LoRA adapters in llama.cpp's GGUF format (src/llama-adapter.cpp): read, checked against a base, written.

An Adapter holds the pairs A, B for matrices of a base by name: y = W x + scale * B (A x). It knows no graph.
Where a base multiplies what an expert gives by a factor s of its own (Gemma 4), llama.cpp adds the adapter behind it,
s W x + B' A x: in a file of such a base B' is s B.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.files import Check
from packtrain.dtypes import bf16, f16, f32
from packtrain.gguf import GGUF, Deferred, Value, write
from packtrain.kernels.quantized_arrays import dequantize
from packtrain.models.lora import EMBEDDING, SUFFIXES, fitting, scale_of

READABLE = (f32, f16, bf16)
AWARE = "packtrain.aware"
ARCHITECTURE, ALPHA = "general.architecture", "adapter.lora.alpha"
INVOCATION = "adapter.alora.invocation_tokens"

NORM = "_norm.weight"

Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter for a base of this architecture: f32 pairs by the name of the base's tensor.

    pairs    A (R, in) and B (out, R) for a matrix (out, in); with a leading axis of experts for each if it has one;
             for the embedding (V, C), whose rows are looked up, A (V, R) and B (C, R)
    alpha    0 stands for a scale of 1, as in llama.cpp
    ignored  vectors in the file that are not used, as in llama.cpp
    aware    it was trained in the blocks of the base: see ops.stored_sum, by which it is merged
    """

    architecture: str
    alpha: float
    pairs: Mapping[str, Pair]
    ignored: tuple[str, ...] = ()
    aware: bool = False

    def scale(self, name: str) -> float:
        return scale_of(self.alpha, self.pairs[name][1].shape[-1])

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start:stop of scale * B A, f32 (stop - start, in); rows of experts follow each other."""
        a, b = self.pairs[name]
        by = np.float32(self.scale(name))
        if name == EMBEDDING:
            return by * (a[start:stop] @ b.T)
        if b.ndim == 2:
            return by * (b[start:stop] @ a)
        count = b.shape[1]
        parts = [
            b[e, max(start - e * count, 0) : stop - e * count] @ a[e]
            for e in range(start // count, -(-stop // count))
        ]
        return by * np.concatenate(parts)


# ---- reading -------------------------------------------------------------------------------------------------


def read_adapter(path: str | Path) -> Adapter:
    """The adapter in a GGUF file. Raises InputError for what llama.cpp would refuse or silently ignore."""
    gguf = GGUF(path)
    values = gguf.metadata
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        actual = values.get(key)
        if not isinstance(actual, str) or actual != expected:
            raise InputError(f"{path}: {key} is {actual!r}; in an adapter it must be {expected!r}")
    if INVOCATION in values:
        raise InputError(
            f"{path}: {INVOCATION} is present; adapters activated by tokens (aLoRA) are not supported"
        )
    architecture, alpha = values.get(ARCHITECTURE), values.get(ALPHA, 0.0)
    if not isinstance(architecture, str):
        raise InputError(f"{path}: {ARCHITECTURE} is {architecture!r}; it must name the base's")
    if not isinstance(alpha, float) or not np.isfinite(alpha):
        raise InputError(f"{path}: {ALPHA} is {alpha!r}; it must be a number")
    ignored = tuple(name for name in gguf.entries if name.endswith(NORM))
    names = dict.fromkeys(_base_name(gguf, n) for n in gguf.entries if n not in ignored)
    if not names:
        raise InputError(
            f"{path}: there are no tensors; an adapter has pairs {' and '.join(SUFFIXES)}"
        )
    pairs = {name: _pair(gguf, name) for name in names}
    return Adapter(architecture, alpha, pairs, ignored, values.get(AWARE) is True)


def _base_name(gguf: GGUF, name: str) -> str:
    base = name.removesuffix(SUFFIXES[0]).removesuffix(SUFFIXES[1])
    if base == name:
        raise InputError(
            f"{gguf.path}: tensor {name} is neither {' nor '.join(SUFFIXES)} of a tensor"
        )
    return base


def _pair(gguf: GGUF, name: str) -> Pair:
    a, b = (_half(gguf, name + suffix) for suffix in SUFFIXES)
    rank = b.shape[-1]
    if a.shape[-1 if name == EMBEDDING else -2] != rank or a.shape[:-2] != b.shape[:-2]:
        raise InputError(
            f"{gguf.path}: {name}: lora_a is {[*a.shape]} and lora_b {[*b.shape]}; their ranks must be equal"
        )
    return a, b


def _half(gguf: GGUF, name: str) -> np.ndarray:
    entry = gguf.entries.get(name)
    if entry is None:
        raise InputError(
            f"{gguf.path}: tensor {name} is missing; halves of an adapter come in pairs"
        )
    if entry.dtype not in READABLE or not 2 <= len(entry.shape) <= 3 or 0 in entry.shape:
        requirement = f"a matrix of {', '.join(map(str, READABLE))}"
        raise InputError(
            f"{gguf.path}: {name} is {entry.dtype}{[*entry.shape]}; it must be {requirement}"
        )
    stored = gguf.array(name)
    values = stored if entry.dtype is f32 else dequantize(stored)
    if not np.isfinite(values).all():
        raise InputError(f"{gguf.path}: {name} has values that are not finite; all must be")
    return values


class _Divided(Mapping[str, Pair]):
    """The pairs of a file whose B are to be divided by factors, made when they are asked for."""

    def __init__(self, pairs: Mapping[str, Pair], factors: Mapping[str, np.ndarray]) -> None:
        self.pairs, self.factors = pairs, factors

    def __getitem__(self, name: str) -> Pair:
        a, b = self.pairs[name]
        if name not in self.factors:
            return a, b
        by = self.factors[name][:, None, None]
        return a, np.divide(b, by, out=np.zeros_like(b), where=by != 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)


def _factors(names: Iterable[str], base: GGUF) -> dict[str, np.ndarray]:
    """Of what experts give (E,), by the names of their matrices."""
    scales = {name: f"{name.removesuffix('weight')}scale" for name in names if "_exps" in name}
    return {name: base.array(scale) for name, scale in scales.items() if scale in base.entries}


def fitted(adapter: Adapter, path: str | Path, base: GGUF) -> Adapter:
    """The adapter of a file as it adds to the matrices of this model. Raises InputError if it does not fit."""
    check_fits(adapter, path, base)
    factors = _factors(adapter.pairs, base)
    return replace(adapter, pairs=_Divided(adapter.pairs, factors)) if factors else adapter


def check_fits(adapter: Adapter, path: str | Path, base: GGUF) -> None:
    """Raise InputError unless the adapter, read from `path`, fits this model."""
    architecture = base.metadata.get(ARCHITECTURE)
    if adapter.architecture != architecture:
        raise InputError(
            f"{path}: the adapter is for {adapter.architecture!r} and {base.path} is {architecture!r}; use its base"
        )
    for name, (a, b) in adapter.pairs.items():
        entry = base.entries.get(name)
        if entry is None:
            raise InputError(
                f"{path}: {base.path} has no tensor {name}; the adapter is for another base"
            )
        if len(entry.shape) < 2 or (a.shape, b.shape) != fitting(entry.shape, name, b.shape[-1]):
            raise InputError(
                f"{path}: {name}: lora_a {[*a.shape]} and lora_b {[*b.shape]} do not fit {[*entry.shape]}"
                f" of {base.path}; the adapter is for another base"
            )


# ---- writing -------------------------------------------------------------------------------------------------


def write_adapter(
    path: str | Path, adapter: Adapter, name: str, base: GGUF | None = None, check: Check = bool
) -> None:
    """Write an adapter for llama.cpp's --lora, in f32; `base` is needed where experts may have factors."""
    factors = _factors(adapter.pairs, base) if base is not None else {}
    metadata = {
        ARCHITECTURE: Value("string", adapter.architecture),
        "general.type": Value("string", "adapter"),
        "adapter.type": Value("string", "lora"),
        "general.name": Value("string", name),
        ALPHA: Value("f32", adapter.alpha),
        **({AWARE: Value("bool", True)} if adapter.aware else {}),
    }
    tensors: dict[str, np.ndarray | Deferred] = {
        of + suffix: half
        for of, pair in adapter.pairs.items()
        for suffix, half in zip(SUFFIXES, pair, strict=True)
    }
    for of, by in factors.items():
        tensors[of + SUFFIXES[1]] = _times(adapter.pairs[of][1], by)
    write(path, metadata, tensors, check=check)


def _times(b: np.ndarray, by: np.ndarray) -> Deferred:
    """B of each expert times its factor, made one after the other."""
    return Deferred(
        f32, b.shape, lambda: (part * factor for part, factor in zip(b, by, strict=True))
    )
