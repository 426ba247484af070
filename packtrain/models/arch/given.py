"""The values of a checkpoint's config.json, checked when they are read, and its rope settings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packtrain.errors import InputError

MOST, CLOSE = 2**31 - 1, 1e-3
SLIDING, FULL = "sliding_attention", "full_attention"
ORIGINAL, PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"


@dataclass(frozen=True, slots=True)
class Given:
    """A config.json; a null value counts as missing."""

    path: Path
    values: Mapping[str, Any]

    def wrong(self, key: str, value: Any, right: str) -> InputError:
        shown = "missing" if value is None else " ".join(repr(value).split())[:80]
        return InputError(f"{self.path}: {key} is {shown}; it must be {right}")

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def renamed(self, names: Mapping[str, tuple[str, ...]]) -> "Given":
        """With the values of other keys, the first that is there, where a key is missing."""
        found = dict(self.values)
        for key, others in names.items():
            here = [found[other] for other in others if found.get(other) is not None]
            if found.get(key) is None and here:
                found[key] = here[0]
        return Given(self.path, found)

    def but(self, **values: Any) -> "Given":
        """With these values instead."""
        return Given(self.path, {**self.values, **values})

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int or not 0 < value <= MOST:
            raise self.wrong(key, value, f"a whole number from 1 to {MOST}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        return self.number(key, self.get(key, default))

    def number(self, key: str, value: Any) -> float:
        """A value from within the config, as a number above 0."""
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.wrong(key, value, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def one_of(self, key: str, default: Any, *allowed: Any) -> None:
        """Refuse a value that no architecture here supports."""
        value = self.get(key, default)
        if value not in allowed:
            raise self.wrong(key, value, " or ".join(map(repr, allowed)))

    # ---- windows

    def windows(self, blocks: int) -> list[bool]:
        """Whether each block has a window, by `layer_types` or the pattern; none if the config says nothing."""
        types, pattern = self.values.get("layer_types"), self.values.get("sliding_window_pattern")
        if isinstance(types, list):
            if len(types) != blocks or set(types) - {SLIDING, FULL}:
                raise self.wrong("layer_types", types, f"{blocks} times {SLIDING} or {FULL}")
            return [kind == SLIDING for kind in types]
        if isinstance(pattern, str) and pattern:
            return [pattern[i % len(pattern)] == "L" for i in range(blocks)]
        if type(pattern) is int and pattern > 0:
            return [(i + 1) % pattern != 0 for i in range(blocks)]
        return []

    def windows_every(self, every: int, blocks: int) -> None:
        """Refuse other windows than in all blocks but every N-th."""
        want = [(i + 1) % every != 0 for i in range(blocks)]
        if self.windows(blocks) not in ([], want):
            right = f"windows but for every {every}th block"
            raise self.wrong("layer_types", self.values.get("layer_types"), right)

    # ---- rope

    def rotation(self) -> dict[str, Any]:
        """The rope settings of the config, under the old key or the new one."""
        found = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        if not isinstance(found, dict):
            raise self.wrong("rope_scaling", found, "an object")
        return found

    def full_rotation(self) -> dict[str, Any]:
        """Rope settings of layers without a window; the base is here or in the config itself."""
        found = self.rotation()
        inner = found.get("full_attention")
        found = inner if isinstance(inner, dict) else found
        theta = self.values.get("rope_theta")
        return found if theta is None else {"rope_theta": theta, **found}

    def base(self, default: float) -> float:
        """The base of rope's frequencies."""
        return self.number("rope_theta", self.full_rotation().get("rope_theta", default))

    def scaling(self) -> str:
        """The type of rope scaling; "default" is none."""
        found = self.full_rotation()
        kind = str(found.get("rope_type", found.get("type")) or "default")
        return "longrope" if kind == "su" else kind  # its former name

    def usual_magnitude(self) -> None:
        """Refuse another factor of YaRN's cosines than 1 + 0.1 ln(factor), for which GGUF has no key."""
        found = self.full_rotation()
        value, factor = found.get("attention_factor"), found.get("factor", 1.0)
        if self.scaling() == "yarn" and value is not None:
            usual = 1 + 0.1 * math.log(self.number("factor", factor))
            if abs(self.number("attention_factor", value) - usual) > CLOSE:
                raise self.wrong("rope_scaling.attention_factor", value, f"{usual:.4f}")

    def turned(self, head_width: int, default: float = 1.0) -> int:
        """How many elements of a head are rotated."""
        share = self.full_rotation().get(PARTIAL, self.get(PARTIAL, default))
        return int(self.number(PARTIAL, share) * head_width)
