"""Reads the GGUF keys of one architecture with checks, and refuses keys that packtrain does not support."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from packtrain.common.errors import InputError
from packtrain.gguf import GGUF
from packtrain.models.arch import ARCHITECTURES
from packtrain.models.arch.architecture import YARN_BETAS, Architecture
from packtrain.models.arch.refused_architectures import NEEDED

MAX_SIZE = 2**31 - 1  # ids, positions and sizes are i32
ROPE_FREQ_BASE = 10_000.0  # llama.cpp's default
RMS_EPS_KEY, EPS_KEY = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
SHARED_KEYS = [
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    RMS_EPS_KEY, "rope.dimension_count", "rope.freq_base", "rope.scale_linear",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.finetuned",
]  # fmt: skip
# sizes that may be given for each block
PER_BLOCK_KEYS = "attention.head_count", "attention.head_count_kv", "feed_forward_length"
# neutral values of unsupported keys
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "attention.scale": (0.0,), "attention.causal": (True,), "attention.temperature_scale": (0.0,),
        "expert_count": (0,), "expert_used_count": (0,), "expert_group_count": (1, 0),
        "expert_group_used_count": (1, 0), "rope.scaling.yarn_ext_factor": (1.0, -1.0),
        "rope.scaling.yarn_attn_factor": (1.0,), "rope.scaling.yarn_log_multiplier": (0.0,),
        **{key: (value,) for key, value in YARN_BETAS.items()},
    }
)  # fmt: skip
CHANGING = ("attention.", "rope.", "expert", "attn_", "final_", "ssm.", "logit_scale", "residual_scale",
            "embedding_scale", "embedding_length_", "leading_dense", "interleave_", "use_parallel", "swiglu_",
            "nextn_", "router_", "moe_", "n_deepstack_", "swin_", "rescale_", "time_", "token_shift_", "kda.", "wkv.",
            "hidden_act", "dense_2_", "dense_3_")  # fmt: skip


class MetadataReader:
    """Reads one architecture's keys of a file; each value is checked when it is read."""

    def __init__(self, gguf: GGUF) -> None:
        self.path, self.metadata = gguf.path, gguf.metadata
        name: Any = self.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            requirement = f", which needs {NEEDED[name]}" if name in NEEDED else ""
            fact = f"{self.path}: general.architecture is {name!r}{requirement}"
            raise InputError(f"{fact}; supported are {', '.join(ARCHITECTURES)}")
        self.architecture = ARCHITECTURES[name]

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value in the file, else `default` (None: the architecture's default; None without one)."""
        default = self.architecture.key_defaults.get(key) if default is None else default
        return self.metadata.get(f"{self.architecture.name}.{key}", default)

    def wrong(self, key: str, value: Any, expected: str) -> InputError:
        """Return the error for a key with this value, which must be as `expected` says."""
        value_text = "missing" if value is None else " ".join(repr(value).split())[:80]
        return InputError(
            f"{self.path}: {self.architecture.name}.{key} is {value_text}; it must be {expected}"
        )

    def size(self, key: str, default: int | None = None, min_size: int = 1) -> int:
        """Return the whole number under `key`, at least `min_size`; `default` as in get. Raises InputError."""
        value = self.get(key, default)
        if key in PER_BLOCK_KEYS and isinstance(value, np.ndarray) and value.dtype.kind in "iu":
            value = int(value[0]) if len({*value.tolist()}) == 1 else value
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if not is_number or not min_size <= value <= MAX_SIZE:
            raise self.wrong(key, value, f"a whole number from {min_size} to {MAX_SIZE}")
        return int(value)

    def real(self, key: str, default: float | None = None, *, zero: bool = False) -> float:
        value = self.get(key, default)
        if not isinstance(value, float) or not (0 < value < math.inf or (zero and value == 0)):
            raise self.wrong(key, value, "0 or more" if zero else "a number above 0")
        return float(str(np.float32(value)))  # 1e-05 exactly, not the nearest f32

    def numbers(self, key: str, kinds: str = "iu") -> list[Any]:
        """Return the array under `key` as a list; [] for any other value. `kinds`: allowed np.dtype.kind letters."""
        value = self.get(key)
        is_array = isinstance(value, np.ndarray) and value.dtype.kind in kinds
        return list(value.tolist()) if is_array else []

    def read_optional_float(self, key: str) -> float:
        """Return the value of `key`, above 0, or 0 if that is the default; 0 if the architecture lacks the key."""
        key_defaults, zero = self.architecture.key_defaults, key in self.architecture.zero_keys
        return self.real(key, zero=zero or key_defaults[key] == 0) if key in key_defaults else 0.0

    def check_supported(self) -> None:
        """Raise InputError for a key that changes the computation and is not supported."""
        known_keys = {
            *SHARED_KEYS, *self.architecture.key_defaults, *self.architecture.ignored_keys, eps_key(self.architecture),
        }  # fmt: skip
        prefix = f"{self.architecture.name}."
        for key in (k.removeprefix(prefix) for k in self.metadata if k.startswith(prefix)):
            neutral_values = self.architecture.neutral
            value, neutral = self.get(key), neutral_values.get(key, NEUTRAL_VALUES.get(key, ()))
            if (key in known_keys and key not in neutral_values) or not key.startswith(CHANGING):
                continue
            if isinstance(value, np.ndarray | list) or value not in neutral:
                expected = f"{neutral[0]!r} or left out" if neutral else "left out"
                raise self.wrong(key, value, f"{expected}: others are not supported")


def eps_key(architecture: Architecture) -> str:
    """Return the key of the eps that norms add to a mean of squares."""
    return EPS_KEY if architecture.layer_norms else RMS_EPS_KEY
