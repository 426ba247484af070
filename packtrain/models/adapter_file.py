"""LoRA adapters in llama.cpp's GGUF format (src/llama-adapter.cpp): read, checked against a base, written.

An Adapter holds the pairs A, B for matrices of a base by name: y = W x + scale * B (A x). Adapters know no graph.
Where a base multiplies an expert's output by a factor s (Gemma 4), llama.cpp adds the adapter after the factor,
s W x + B' A x: files for such a base hold B' = s B."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.files import Check
from packtrain.dtypes import bf16, f16, f32
from packtrain.gguf import GGUF, DeferredTensor, MetadataValue, write_gguf
from packtrain.kernels.quant.quantized_arrays import dequantize
from packtrain.models.lora import EMBEDDING, SUFFIXES, fitting, lora_scale

READABLE_DTYPES = (f32, f16, bf16)
AWARE_KEY = "packtrain.aware"
ARCHITECTURE_KEY, ALPHA_KEY = "general.architecture", "adapter.lora.alpha"
INVOCATION_KEY = "adapter.alora.invocation_tokens"

NORM_SUFFIX = "_norm.weight"

Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter for a base of this architecture: f32 pairs by the name of the base's tensor."""

    architecture: str
    alpha: float  # 0 stands for a scale of 1, as in llama.cpp
    # A (R, in) and B (out, R) for a matrix (out, in), with a leading axis of experts if the matrix has one; for the
    # embedding (V, C), whose rows are looked up, A (V, R) and B (C, R)
    lora_pairs: Mapping[str, Pair]
    ignored: tuple[str, ...] = ()  # vectors in the file that are not used, as in llama.cpp
    # trained with W + scale * B A rounded to the base's quantization blocks, as ops.stored_sum merges it
    aware: bool = False

    def scale_of(self, name: str) -> float:
        return lora_scale(self.alpha, self.lora_pairs[name][1].shape[-1])

    def delta_rows(self, name: str, row_start: int, row_stop: int) -> np.ndarray:
        """Return rows row_start:row_stop of scale * B A, f32; row numbers of a stack go on from expert to expert."""
        a, b = self.lora_pairs[name]
        adapter_scale = np.float32(self.scale_of(name))
        if name == EMBEDDING:
            return adapter_scale * (a[row_start:row_stop] @ b.T)
        if b.ndim == 2:
            return adapter_scale * (b[row_start:row_stop] @ a)
        rows_per_expert = b.shape[1]
        expert_deltas = [
            b[e, max(row_start - e * rows_per_expert, 0) : row_stop - e * rows_per_expert] @ a[e]
            for e in range(row_start // rows_per_expert, -(-row_stop // rows_per_expert))
        ]
        return adapter_scale * np.concatenate(expert_deltas)


# ---- reading -------------------------------------------------------------------------------------------------


def read_adapter(path: str | Path) -> Adapter:
    """Read the adapter in a GGUF file. Raises InputError for what llama.cpp would refuse or silently ignore."""
    gguf = GGUF(path)
    metadata = gguf.metadata
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        actual = metadata.get(key)
        if not isinstance(actual, str) or actual != expected:
            raise InputError(f"{path}: {key} is {actual!r}; in an adapter it must be {expected!r}")
    if INVOCATION_KEY in metadata:
        fact = f"{path}: {INVOCATION_KEY} is present"
        raise InputError(f"{fact}; adapters activated by tokens (aLoRA) are not supported")
    architecture, alpha = metadata.get(ARCHITECTURE_KEY), metadata.get(ALPHA_KEY, 0.0)
    if not isinstance(architecture, str):
        raise InputError(f"{path}: {ARCHITECTURE_KEY} is {architecture!r}; it must name the base's")
    if not isinstance(alpha, float) or not np.isfinite(alpha):
        raise InputError(f"{path}: {ALPHA_KEY} is {alpha!r}; it must be a number")
    ignored = tuple(name for name in gguf.entries if name.endswith(NORM_SUFFIX))
    base_names = dict.fromkeys(_base_name(gguf, n) for n in gguf.entries if n not in ignored)
    if not base_names:
        fact = f"{path}: there are no tensors; an adapter has pairs {' and '.join(SUFFIXES)}"
        raise InputError(fact)
    lora_pairs = {name: _read_pair(gguf, name) for name in base_names}
    return Adapter(architecture, alpha, lora_pairs, ignored, metadata.get(AWARE_KEY) is True)


def _base_name(gguf: GGUF, name: str) -> str:
    """Return the base's tensor to which the adapter's tensor `name`, a lora_a or lora_b, belongs. Raises InputError."""
    base_name = name.removesuffix(SUFFIXES[0]).removesuffix(SUFFIXES[1])
    if base_name == name:
        fact = f"{gguf.path}: tensor {name} is neither {' nor '.join(SUFFIXES)} of a tensor"
        raise InputError(fact)
    return base_name


def _read_pair(gguf: GGUF, name: str) -> Pair:
    a, b = (_read_half(gguf, name + suffix) for suffix in SUFFIXES)
    rank = b.shape[-1]
    if a.shape[-1 if name == EMBEDDING else -2] != rank or a.shape[:-2] != b.shape[:-2]:
        fact = f"{gguf.path}: {name}: lora_a is {[*a.shape]} and lora_b {[*b.shape]}"
        raise InputError(f"{fact}; their ranks must be equal")
    return a, b


def _read_half(gguf: GGUF, name: str) -> np.ndarray:
    entry = gguf.entries.get(name)
    if entry is None:
        fact = f"{gguf.path}: tensor {name} is missing; halves of an adapter come in pairs"
        raise InputError(fact)
    if entry.dtype not in READABLE_DTYPES or not 2 <= len(entry.shape) <= 3 or 0 in entry.shape:
        requirement = f"a matrix of {', '.join(map(str, READABLE_DTYPES))}"
        fact = f"{gguf.path}: {name} is {entry.dtype}{[*entry.shape]}; it must be {requirement}"
        raise InputError(fact)
    stored_array = gguf.array(name)
    f32_values = stored_array if entry.dtype is f32 else dequantize(stored_array)
    if not np.isfinite(f32_values).all():
        raise InputError(f"{gguf.path}: {name} has values that are not finite; all must be")
    return f32_values


class _DividedPairs(Mapping[str, Pair]):
    """LoRA pairs A, B by name; reading one divides B by the factors with which the base multiplies experts' outputs."""

    def __init__(self, pairs: Mapping[str, Pair], divisors: Mapping[str, np.ndarray]) -> None:
        self.pairs, self.divisors = pairs, divisors

    def __getitem__(self, name: str) -> Pair:
        a, b = self.pairs[name]
        if name not in self.divisors:
            return a, b
        divisor = self.divisors[name][:, None, None]
        return a, np.divide(b, divisor, out=np.zeros_like(b), where=divisor != 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)


def _expert_factors(names: Iterable[str], base: GGUF) -> dict[str, np.ndarray]:
    """Return {experts' matrix: factors (E,) by which the base multiplies its experts' outputs}, of those in `names`."""
    scale_names = {name: f"{name.removesuffix('weight')}scale" for name in names if "_exps" in name}
    return {name: base.array(scale) for name, scale in scale_names.items() if scale in base.entries}


def fit_adapter(adapter: Adapter, path: str | Path, base: GGUF) -> Adapter:
    """Check the adapter of file `path` against its base, and divide B by experts' output factors. Raises InputError."""
    check_fits(adapter, path, base)
    expert_factors = _expert_factors(adapter.lora_pairs, base)
    if not expert_factors:
        return adapter
    return replace(adapter, lora_pairs=_DividedPairs(adapter.lora_pairs, expert_factors))


def check_fits(adapter: Adapter, path: str | Path, base: GGUF) -> None:
    """Raise InputError unless the adapter, read from `path`, fits the base."""
    architecture = base.metadata.get(ARCHITECTURE_KEY)
    if adapter.architecture != architecture:
        raise InputError(
            f"{path}: the adapter is for {adapter.architecture!r} and {base.path} is {architecture!r}; use its base"
        )
    for name, (a, b) in adapter.lora_pairs.items():
        entry = base.entries.get(name)
        if entry is None:
            fact = f"{path}: {base.path} has no tensor {name}; the adapter is for another base"
            raise InputError(fact)
        if len(entry.shape) < 2 or (a.shape, b.shape) != fitting(entry.shape, name, b.shape[-1]):
            raise InputError(
                f"{path}: {name}: lora_a {[*a.shape]} and lora_b {[*b.shape]} do not fit {[*entry.shape]}"
                f" of {base.path}; the adapter is for another base"
            )


# ---- writing -------------------------------------------------------------------------------------------------


def write_adapter(
    path: str | Path, adapter: Adapter, name: str, base: GGUF | None = None, check: Check = bool
) -> None:
    """Write an adapter for llama.cpp's --lora, in f32; `name`: for the metadata; B is multiplied by factors that `base`
    has for outputs of experts; check(path) may refuse the file by raising, before it gets its name."""
    expert_factors = _expert_factors(adapter.lora_pairs, base) if base is not None else {}
    metadata = {
        ARCHITECTURE_KEY: MetadataValue("string", adapter.architecture),
        "general.type": MetadataValue("string", "adapter"), "adapter.type": MetadataValue("string", "lora"),
        "general.name": MetadataValue("string", name), ALPHA_KEY: MetadataValue("f32", adapter.alpha),
        **({AWARE_KEY: MetadataValue("bool", True)} if adapter.aware else {}),
    }  # fmt: skip
    adapter_tensors: dict[str, np.ndarray | DeferredTensor] = {
        n + s: a for n, p in adapter.lora_pairs.items() for s, a in zip(SUFFIXES, p, strict=True)
    }
    for base_name, factor in expert_factors.items():
        adapter_tensors[base_name + SUFFIXES[1]] = _times(adapter.lora_pairs[base_name][1], factor)
    write_gguf(path, metadata, adapter_tensors, check=check)


def _times(b: np.ndarray, by: np.ndarray) -> DeferredTensor:
    """Return B (E, out, R) of all experts, each multiplied by its factor of `by` (E,) only when the file is written."""
    return DeferredTensor(f32, b.shape, lambda: (e * f for e, f in zip(b, by, strict=True)))
