"""Reads values of a checkpoint's config.json with checks, and its rope settings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packtrain.common.errors import InputError

MAX_SIZE, FIXED_EPS = 2**31 - 1, 1e-6
SLIDING, FULL, WINDOW = "sliding_attention", "full_attention", "sliding_window"
ORIGINAL, PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"
ROPE_KEYS = "rope_parameters", "rope_scaling"  # the new key and the old one


class RopeSettings(dict[str, Any]):
    """Rope settings within a config; `read_keys` collects the names of the keys that were read."""

    def __init__(self, settings: Any, read_keys: set[str]) -> None:
        super().__init__(settings if isinstance(settings, dict) else {})
        self.read_keys = read_keys

    def get(self, key: str, default: Any = None) -> Any:
        self.read_keys.add(f"{ROPE_KEYS[0]}.{key}")
        return super().get(key, default)


@dataclass(frozen=True, slots=True)
class HFConfig:
    """A config.json; a null value counts as missing.

    read_keys  names of the keys that were read; every method that returns a value adds to them
    notes      messages for the user about readers of the checkpoint that compute something else
    """

    path: Path
    json_values: Mapping[str, Any]
    read_keys: set[str] = field(default_factory=set, compare=False)
    notes: list[str] = field(default_factory=list, compare=False)

    def wrong(self, key: str, value: Any, expected: str) -> InputError:
        """Return the error for a key with this value, which must be as `expected` says."""
        value_text = "missing" if value is None else " ".join(repr(value).split())[:80]
        return InputError(f"{self.path}: {key} is {value_text}; it must be {expected}")

    def get(self, key: str, default: Any = None) -> Any:
        self.read_keys.add(key)
        value = self.json_values.get(key)
        is_null = value is None and key in self.json_values
        if is_null and default is True and key != "tie_word_embeddings":  # false to transformers
            raise self.wrong(key, "null", "true or false")
        return default if value is None else value

    def get_nullable(self, key: str, default: Any = None) -> Any:
        """Return a value, or None for a null, which get() would replace by the default."""
        self.read_keys.add(key)
        return self.json_values.get(key, default)

    def unread_values(self) -> Iterator[tuple[str, Any]]:
        """Yield (key, value) of keys that no conversion has read: they may change the model. Rope's have a prefix."""
        for key, value in self.json_values.items():
            if key not in self.read_keys:
                yield key, value
            elif key in ROPE_KEYS and isinstance(value, dict):
                full = value.get(FULL)
                for name, inner_value in (value | (full if isinstance(full, dict) else {})).items():
                    if f"{ROPE_KEYS[0]}.{name}" not in self.read_keys:
                        yield f"{key}.{name}", inner_value

    def with_aliases(self, key_aliases: Mapping[str, tuple[str, ...]]) -> "HFConfig":
        """Return a config in which a missing key has the value of its first alias, of {key: aliases}, that exists."""
        values = dict(self.json_values)
        for key, aliases in key_aliases.items():
            for alias in aliases:
                if values.get(key) in (None, values.get(alias)) and values.get(alias) is not None:
                    values[key] = self.get(alias)
        return HFConfig(self.path, values, self.read_keys, self.notes)

    def but(self, **new_values: Any) -> "HFConfig":
        """Return a copy of the config with `new_values`; both share read_keys and notes."""
        return HFConfig(self.path, {**self.json_values, **new_values}, self.read_keys, self.notes)

    def size(self, key: str, default: int | None = None) -> int:
        """Return the whole number of 1 or more under `key`, or `default` (None: required). Raises InputError."""
        value = self.get(key, default)
        if type(value) is not int or not 0 < value <= MAX_SIZE:
            raise self.wrong(key, value, f"a whole number from 1 to {MAX_SIZE}")
        return value

    def optional_size(self, key: str) -> int:
        """Return the value of `key`, a whole number; 0 if the config has 0, null or no such key."""
        return self.size(key) if self.get(key) else 0

    def real(self, key: str, default: float | None = None) -> float:
        return self.number(key, self.get(key, default))

    def number(self, key: str, value: Any) -> float:
        """Return `value`, found in the config under `key`, as a float. Raises InputError unless it is above 0."""
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.wrong(key, value, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def require_one_of(self, key: str, default: Any, *allowed: Any) -> None:
        """Raise InputError unless the value of `key`, or `default` if it is missing, is one of `allowed`."""
        value = self.get(key, default)
        if value not in allowed:
            raise self.wrong(key, value, " or ".join(map(repr, allowed)))

    # ---- windows

    def layer_types(self, blocks: int, *allowed: str, every: bool = False) -> list[str]:
        """Return `layer_types`: for each of `blocks`, one of `allowed`; `every` demands that each of these occurs."""
        types = self.get("layer_types")
        is_valid = (
            isinstance(types, list) and len(types) == blocks and all(k in allowed for k in types)
        )
        if not is_valid or (every and any(layer_type not in types for layer_type in allowed)):
            expected = f"{blocks} times {' or '.join(allowed)}{', all present' if every else ''}"
            raise self.wrong("layer_types", types, expected)
        return list(types)

    def layer_windows(self, blocks: int, is_required: bool = False) -> list[bool]:
        """Return whether each block has a window, by `layer_types` (`is_required`: only so) or the pattern; else []."""
        type_names, pattern = self.get("layer_types"), self.get("sliding_window_pattern")
        if type_names is not None or is_required:
            return [layer_type == SLIDING for layer_type in self.layer_types(blocks, SLIDING, FULL)]
        if isinstance(pattern, str) and pattern:
            return [pattern[i % len(pattern)] == "L" for i in range(blocks)]
        if type(pattern) is int and pattern > 0:
            return [(i + 1) % pattern != 0 for i in range(blocks)]
        return []

    def require_window_interval(self, window_interval: int, blocks: int) -> None:
        """Raise InputError unless all blocks but every `window_interval`-th have windows, or no windows are stated."""
        expected = [(i + 1) % window_interval != 0 for i in range(blocks)]
        if self.layer_windows(blocks) not in ([], expected):
            requirement = f"windows but for every {window_interval}th block"
            raise self.wrong("layer_types", self.get("layer_types"), requirement)

    def effective_window(self, used: bool) -> int:
        """Return the width of the sliding window; 0 if `use_sliding_window`, by default `used`, turns windows off."""
        has_window = self.get(WINDOW) not in (None, 0)
        return self.size(WINDOW) if self.flag("use_sliding_window", used) and has_window else 0

    # ---- rope

    def rope_settings(self) -> RopeSettings:
        """Return rope_scaling, which transformers prefers, or rope_parameters. Raises InputError if both differ."""
        new_settings, old = (self.get(key) or {} for key in ROPE_KEYS)
        if not isinstance(new_settings, dict) or not isinstance(old, dict):
            raise self.wrong("rope_scaling", old or new_settings, "an object")
        if new_settings and old and new_settings != old:
            raise self.wrong("rope_scaling", old, "left out beside rope_parameters, or equal")
        if not new_settings and FULL in old:
            raise self.wrong("rope_scaling", old, "under rope_parameters, if by types of layers")
        return RopeSettings(old or new_settings, self.read_keys)

    def full_rotation(self) -> RopeSettings:
        """Return the rope settings of layers without a sliding window, `rope_theta` included."""
        settings = self.rope_settings()
        inner = settings.get(FULL)
        settings = RopeSettings(inner, self.read_keys) if isinstance(inner, dict) else settings
        # of two different values, versions of transformers take one or the other
        disputed_keys = {ORIGINAL} if self.get(ROPE_KEYS[0]) else {ORIGINAL, PARTIAL, "rope_theta"}
        for key in settings.keys() & disputed_keys:
            outer_value, inner_value = self.json_values.get(key), settings[key]
            if None not in (outer_value, inner_value) and outer_value != inner_value:
                expected = f"{inner_value!r}, as among the settings of rope, or left out"
                raise self.wrong(key, outer_value, expected)
        return RopeSettings({"rope_theta": self.get("rope_theta"), **settings}, self.read_keys)

    def window_rope_base(self, default: float = 10_000.0) -> float:
        """Return rope's frequency base in layers with a window, else `default`. Raises InputError if rope is scaled."""
        window_settings, new_settings = self.rope_settings().get(SLIDING), self.get(ROPE_KEYS[0])
        if self.scaling() != "default" and self.full_rotation().get("rope_type") is None:
            # versions of transformers differ in whether `type` alone counts here
            raise self.wrong("rope_scaling.rope_type", None, f"{self.scaling()!r}, as type is")
        if new_settings and FULL not in new_settings:
            raise self.wrong(ROPE_KEYS[0], new_settings, f"an object with {FULL} and {SLIDING}")
        settings = window_settings if isinstance(window_settings, dict) else {}
        base_frequency = self.get("rope_local_base_freq", default)
        for key, value in settings.items():
            if key == "rope_theta":
                base_frequency = base_frequency if value is None else value
            elif value not in (None, "default", 1.0):
                expected = "left out or default: layers with a window have plain rope"
                raise self.wrong(f"rope_parameters.{SLIDING}.{key}", value, expected)
        return self.number("rope_local_base_freq", base_frequency)

    def rope_base(self, default: float) -> float:
        """Return the base of rope's frequencies, else `default`; 0: rope settings must be there. Raises InputError."""
        if not default and not self.rope_settings():  # the class itself then takes YaRN
            raise self.wrong(ROPE_KEYS[0], None, "an object, as this class has YaRN without it")
        base = self.full_rotation().get("rope_theta")
        base = self.number("rope_theta", (default or None) if base is None else base)
        if base <= 1 and self.scaling() == "yarn":
            raise self.wrong("rope_theta", base, "above 1, as YaRN divides by its logarithm")
        return base

    def scaling(self) -> str:
        """Return the type of rope scaling of layers without a window; "default": no scaling."""
        settings = self.full_rotation()
        new_type, old_type = settings.get("rope_type"), settings.get("type")
        scaling_type = str((old_type if new_type is None else new_type) or "default")
        return "longrope" if scaling_type == "su" else scaling_type  # its former name

    def note_fixed_eps(self, part: str) -> None:
        """Add to `notes` that transformers gives `part` of the model an eps of 1e-6, if the config has another."""
        if (eps := self.real("rms_norm_eps")) != FIXED_EPS:
            fact = f"rms_norm_eps is {eps:g}, and transformers takes {FIXED_EPS:g} for {part}"
            self.notes.append(f"{fact}; packtrain and llama.cpp take {eps:g}, as the file has one")

    def rotated_width(self, head_width: int, default: float = 1.0) -> int:
        """Return how many of a head's elements rope rotates; `default`: their share if the config has none."""
        rotated_share = self.full_rotation().get(PARTIAL)
        rotated_share = self.get(PARTIAL, default) if rotated_share is None else rotated_share
        return int(self.number(PARTIAL, rotated_share) * head_width)
