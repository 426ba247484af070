"""The metadata of a model file: GGUF keys to a Config and back, for every architecture.

A key that changes the computation is supported or refused; keys that llama.cpp ignores for an architecture are
ignored here, too, so that both compute the same. Defaults are llama.cpp's (llama-model.cpp, src/models).
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast, get_args

import numpy as np

from packtrain.dtypes import DTYPES
from packtrain.errors import InputError
from packtrain.gguf import GGUF, QUANTIZATION_VERSION, Value
from packtrain.models.arch import ARCHITECTURES
from packtrain.models.arch.architecture import BETAS, Architecture
from packtrain.models.arch.refused import NEEDED
from packtrain.models.config import Config, RopeScaling, Scaling

MOST = 2**31 - 1  # ids, positions and sizes are i32
WIDEST = 64  # limit, times the embedding width: a small hostile file must not take much memory
MOST_EXPERTS = 512  # as in llama.cpp
ROPE_FREQ_BASE = 10_000.0  # the default
RMS_EPS, EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
SHARED = [
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    RMS_EPS, "rope.dimension_count", "rope.freq_base", "rope.scale_linear",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.finetuned",
]  # fmt: skip
WINDOWS, EXPERT_WIDTH = "attention.sliding_window_pattern", "expert_feed_forward_length"
# neutral values of unsupported keys
NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "attention.scale": (0.0,),
        "attention.causal": (True,),
        "attention.temperature_scale": (0.0,),
        "expert_count": (0,),
        "expert_used_count": (0,),
        "rope.scaling.yarn_ext_factor": (1.0, -1.0),
        "rope.scaling.yarn_attn_factor": (1.0,),
        "rope.scaling.yarn_log_multiplier": (0.0,),
        **{key: (value,) for key, value in BETAS.items()},
    }
)
CHANGING = ("attention.", "rope.", "expert", "attn_", "final_", "ssm.", "logit_scale", "residual_scale",
            "embedding_scale", "embedding_length_", "leading_dense", "use_parallel", "swiglu_", "nextn_")  # fmt: skip

# ---- reading -------------------------------------------------------------------------------------------------


class Keys:
    """The keys of one architecture in a file; values are checked when they are read."""

    def __init__(self, gguf: GGUF) -> None:
        self.path, self.metadata = gguf.path, gguf.metadata
        found: Any = self.metadata.get("general.architecture")
        if not isinstance(found, str) or found not in ARCHITECTURES:
            need = f", which needs {NEEDED[found]}" if found in NEEDED else ""
            raise InputError(
                f"{self.path}: general.architecture is {found!r}{need}; supported are {', '.join(ARCHITECTURES)}"
            )
        self.architecture = ARCHITECTURES[found]

    def get(self, key: str, default: Any = None) -> Any:
        """The value in the file, else `default`, else the architecture's default."""
        default = self.architecture.keys.get(key) if default is None else default
        return self.metadata.get(f"{self.architecture.name}.{key}", default)

    def wrong(self, key: str, value: Any, right: str) -> InputError:
        shown = "missing" if value is None else " ".join(repr(value).split())[:80]
        return InputError(
            f"{self.path}: {self.architecture.name}.{key} is {shown}; it must be {right}"
        )

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            raise self.wrong(key, value, f"a whole number from {least} to {MOST}")
        return value

    def real(self, key: str, default: float | None = None, *, zero: bool = False) -> float:
        value = self.get(key, default)
        if not isinstance(value, float) or not (0 < value < math.inf or (zero and value == 0)):
            raise self.wrong(key, value, "0 or more" if zero else "a number above 0")
        return float(str(np.float32(value)))  # 1e-05 exactly, not the nearest f32

    def own(self, key: str) -> float:
        """A key of some architectures, 0 for the others; must be positive unless its default is 0."""
        default = self.architecture.keys.get(key, 0.0)
        return self.real(key, zero=default == 0) if key in self.architecture.keys else 0.0

    def check(self) -> None:
        """Raise InputError for a key that changes the computation and is not supported."""
        known = {
            *SHARED,
            *self.architecture.keys,
            *self.architecture.ignored,
            eps_key(self.architecture),
        }
        prefix = f"{self.architecture.name}."
        for key in (k.removeprefix(prefix) for k in self.metadata if k.startswith(prefix)):
            own = self.architecture.neutral
            value, neutral = self.get(key), own.get(key, NEUTRAL.get(key, ()))
            if (key in known and key not in own) or not key.startswith(CHANGING):
                continue
            if isinstance(value, np.ndarray | list) or value not in neutral:
                right = f"{neutral[0]!r} or left out" if neutral else "left out"
                raise self.wrong(key, value, f"{right}: others are not supported")


def read(gguf: GGUF) -> Config:
    """The Config of a model file, from its metadata and its optional tensors. Raises InputError."""
    keys = Keys(gguf)
    keys.check()
    blocks = keys.size("block_count")
    heads = keys.size("attention.head_count")
    config = Config(
        vocab_size=_vocabulary_size(gguf),
        context_length=keys.size("context_length"),
        embedding_length=keys.size("embedding_length"),
        block_count=blocks,
        feed_forward_length=keys.size("feed_forward_length"),
        head_count=heads,
        head_count_kv=keys.size("attention.head_count_kv", heads),
        rope_freq_base=keys.real("rope.freq_base", ROPE_FREQ_BASE),
        rms_eps=keys.real(eps_key(keys.architecture)),
        tied=_tied(gguf, keys.architecture),
        architecture=keys.architecture.name,
        optional=_optional(gguf, keys.architecture),
        rope_scaling=_scaling(keys),
        attention_softcap=keys.own("attn_logit_softcapping"),
        final_softcap=keys.own("final_logit_softcapping"),
        temperature_scale=keys.own("attention.temperature_scale"),
        score_scale=keys.own("attention.scale"),
        embedding_scale=keys.own("embedding_scale"),
        residual_scale=keys.own("residual_scale"),
        logit_scale=keys.own("logit_scale"),
        **_heads(keys, heads),
        **_windows(keys),
        **_mixture(keys),
    )
    _check_widths(keys, config)
    _check_heads(keys, config)
    return config


def eps_key(architecture: Architecture) -> str:
    """The key of what norms add to a mean of squares."""
    return EPS if architecture.layer_norms else RMS_EPS


def _vocabulary_size(gguf: GGUF) -> int:
    entry = gguf.entries.get("token_embd.weight")
    if entry is None:
        raise InputError(
            f"{gguf.path}: there is no tensor token_embd.weight; a model needs its weights"
        )
    if len(entry.shape) != 2 or not 0 < entry.shape[0] <= MOST:
        raise InputError(
            f"{gguf.path}: token_embd.weight has shape {list(entry.shape)}; it must be [vocabulary, width]"
        )
    return entry.shape[0]


def _tied(gguf: GGUF, architecture: Architecture) -> bool:
    separate = architecture.always_apart or "output.weight" in gguf.entries
    return architecture.always_tied or not separate


def _optional(gguf: GGUF, architecture: Architecture) -> tuple[str, ...]:
    names = architecture.optional
    return tuple(n for n in names if n in gguf.entries or f"blk.0.{n}" in gguf.entries)


def _scaling(keys: Keys) -> RopeScaling:
    """Rope scaling; as in llama.cpp, a factor alone means linear scaling."""
    type = keys.get("rope.scaling.type", "linear")
    if not isinstance(type, str) or type not in get_args(Scaling):
        raise keys.wrong("rope.scaling.type", type, " or ".join(get_args(Scaling)))
    old = keys.real("rope.scale_linear", 0.0, zero=True)
    factor = keys.real("rope.scaling.factor", old, zero=True) or 1.0
    if type == "none" or (type == "linear" and factor == 1):
        type, factor = "none", 1.0
    if type == "yarn" and factor < 1:
        raise keys.wrong("rope.scaling.factor", factor, "1 or more")
    if type == "yarn" and keys.real("rope.freq_base", ROPE_FREQ_BASE) <= 1:
        raise keys.wrong("rope.freq_base", keys.get("rope.freq_base"), "above 1 with yarn")
    context = keys.size("context_length")
    original = keys.size("rope.scaling.original_context_length", context)
    return RopeScaling(
        cast(Scaling, type),
        factor,
        0 if original == context else original,
        keys.real("rope.scaling.attn_factor", 1.0),
        keys.real("rope.scaling.yarn_beta_fast", 32.0),
        keys.real("rope.scaling.yarn_beta_slow", 1.0),
        keys.own("rope.scaling.yarn_log_multiplier"),
    )


def _heads(keys: Keys, heads: int) -> dict[str, Any]:
    """Head widths that do not follow from embedding_length."""
    width = keys.size("embedding_length") // heads
    length = keys.size("attention.key_length", width or 1)
    dims = keys.size("rope.dimension_count", length)
    return {
        "key_length": None if length == width else length,
        "rope_dims": None if dims == length else dims,
    }


def _windows(keys: Keys) -> dict[str, Any]:
    """Sliding windows, for architectures that have them."""
    if not keys.architecture.windowed(keys.size("block_count")):
        return {}
    pattern = keys.get(WINDOWS)
    if isinstance(pattern, np.ndarray) and len(pattern) >= keys.size("block_count"):
        pattern = tuple(map(bool, pattern.tolist()))
    else:
        pattern = keys.size(WINDOWS, least=0)
    return {
        "window": keys.size("attention.sliding_window", least=0),
        "window_pattern": pattern,
        "rope_freq_base_swa": keys.own("rope.freq_base_swa") or None,
    }


def _mixture(keys: Keys) -> dict[str, Any]:
    own = keys.architecture.keys
    must = own.get("expert_count", 0) is None
    if not must and not keys.size("expert_count", 0, least=0):
        return {}
    count = keys.size("expert_count")
    if count > MOST_EXPERTS:
        raise keys.wrong("expert_count", count, f"at most {MOST_EXPERTS}")
    used = keys.size("expert_used_count")
    if used > count:
        raise keys.wrong(
            "expert_used_count", used, f"{keys.architecture.name}.expert_count {count} at most"
        )
    width = None
    if EXPERT_WIDTH in own:
        width = keys.size(EXPERT_WIDTH, keys.size("feed_forward_length") // used)
    return {"expert_count": count, "expert_used_count": used, "expert_feed_forward_length": width}


def _check_heads(keys: Keys, config: Config) -> None:
    width, heads, kv = config.embedding_length, config.head_count, config.head_count_kv
    arch, head, square = config.architecture, config.head_width, config.traits.square
    partial = config.traits.partial_rope
    if keys.get("attention.key_length") is None and width % (2 * heads):
        right = f"a divisor of half of {arch}.embedding_length {width}, so that heads have an even width"
        raise keys.wrong("attention.head_count", heads, right)
    if heads % kv:
        right = f"a divisor of {arch}.attention.head_count {heads}"
        raise keys.wrong("attention.head_count_kv", kv, right)
    if head % 2 or (square and config.key_length is not None):
        right = f"embedding_length / head_count = {width // heads}" if square else "even"
        raise keys.wrong("attention.key_length", head, right)
    if keys.size("attention.value_length", head) != head:
        value = keys.get("attention.value_length")
        raise keys.wrong("attention.value_length", value, f"the width of keys, {head}")
    dims = config.rope_width
    if dims % 2 or dims > head or (dims < head and not partial):
        right = f"even and at most {head}" if partial else f"the width of a head, {head}"
        raise keys.wrong("rope.dimension_count", dims, right)


def _check_widths(keys: Keys, config: Config) -> None:
    most, used = WIDEST * config.embedding_length, config.expert_used_count or 1
    wide = "feed_forward_length" if config.expert_feed_forward_length is None else EXPERT_WIDTH
    for key, size, times in (
        (wide, config.expert_width, used),
        ("attention.key_length", config.head_width, config.head_count),
    ):
        if size * times > most:
            raise keys.wrong(
                key, size, f"at most {most // times}, by embedding_length {config.embedding_length}"
            )


# ---- writing -------------------------------------------------------------------------------------------------


def metadata(config: Config, name: str, dtype: str = "f32") -> dict[str, Value]:
    """The general.* keys and those of the architecture, for a model file whose matrices are of `dtype`."""
    arch, scaling = config.architecture, config.rope_scaling
    sizes = {
        "vocab_size": config.vocab_size,
        "context_length": config.context_length,
        "embedding_length": config.embedding_length,
        "block_count": config.block_count,
        "feed_forward_length": config.feed_forward_length,
        "attention.head_count": config.head_count,
        "attention.head_count_kv": config.head_count_kv,
        "rope.dimension_count": config.rope_width,
    }
    reals = {
        "rope.freq_base": config.rope_freq_base,
        eps_key(config.traits): config.rms_eps,
    }
    if config.traits.learned_positions:
        del sizes["rope.dimension_count"], reals["rope.freq_base"]
    if config.key_length is not None:
        sizes |= dict.fromkeys(
            ("attention.key_length", "attention.value_length"), config.key_length
        )
    if config.expert_count:
        sizes |= {
            "expert_count": config.expert_count,
            "expert_used_count": config.expert_used_count,
        }
    if EXPERT_WIDTH in config.traits.keys:
        sizes[EXPERT_WIDTH] = config.expert_width
    return {
        **_general(arch, name, dtype),
        **{f"{arch}.{key}": Value("u32", size) for key, size in sizes.items()},
        **{f"{arch}.{key}": Value("f32", real) for key, real in reals.items()},
        **{f"{arch}.{key}": value for key, value in _scaling_keys(config, scaling).items()},
        **{f"{arch}.{key}": value for key, value in _window_keys(config).items()},
        **{f"{arch}.{key}": value for key, value in _factor_keys(config).items()},
    }


def _general(architecture: str, name: str, dtype: str) -> dict[str, Value]:
    return {
        "general.architecture": Value("string", architecture),
        "general.type": Value("string", "model"),
        "general.name": Value("string", name),
        "general.file_type": Value("u32", DTYPES[dtype].file_type),
        "general.quantization_version": Value("u32", QUANTIZATION_VERSION),
    }


def _scaling_keys(config: Config, scaling: RopeScaling) -> dict[str, Value]:
    reals = {
        "rope.scaling.factor": (scaling.factor, 1.0),
        "rope.scaling.attn_factor": (scaling.attn_factor, 1.0),
        "rope.scaling.yarn_log_multiplier": (scaling.log_multiplier, 0.0),
        "rope.scaling.yarn_beta_fast": (scaling.beta_fast, 32.0),
        "rope.scaling.yarn_beta_slow": (scaling.beta_slow, 1.0),
        "attention.temperature_scale": (config.temperature_scale, 0.0),
    }
    keys = {key: Value("f32", real) for key, (real, usual) in reals.items() if real != usual}
    if scaling.original_context:
        keys["rope.scaling.original_context_length"] = Value("u32", scaling.original_context)
    if scaling.type != "none":
        keys["rope.scaling.type"] = Value("string", scaling.type)
    return keys


def _window_keys(config: Config) -> dict[str, Value]:
    own, pattern = config.traits.keys, config.window_pattern
    if not config.traits.windowed(config.block_count):
        return {}
    keys = {"attention.sliding_window": Value("u32", config.window)}
    if pattern != own[WINDOWS]:
        keys[WINDOWS] = Value("bool" if isinstance(pattern, tuple) else "u32", pattern)
    if config.rope_freq_base_swa is not None:
        keys["rope.freq_base_swa"] = Value("f32", config.rope_freq_base_swa)
    return keys


def _factor_keys(config: Config) -> dict[str, Value]:
    """Caps and scales."""
    factors = {
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.final_softcap,
        "attention.scale": config.score_scale,
        "embedding_scale": config.embedding_scale,
        "residual_scale": config.residual_scale,
        "logit_scale": config.logit_scale,
    }
    return {key: Value("f32", factor) for key, factor in factors.items() if factor}
