"""The values of a checkpoint's config.json, checked when they are read, and its rope settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packtrain.errors import InputError

MOST = 2**31 - 1
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

    def scaling(self) -> str:
        """The type of rope scaling; "default" is none."""
        found = self.full_rotation()
        kind = str(found.get("rope_type", found.get("type")) or "default")
        return "longrope" if kind == "su" else kind  # its former name

    def turned(self, head_width: int) -> int:
        """How many elements of a head are rotated."""
        share = self.full_rotation().get(PARTIAL, self.values.get(PARTIAL, 1.0))
        return int(self.number(PARTIAL, share) * head_width)
