"""The values of a checkpoint's config.json, checked when they are read, and its rope settings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packtrain.common.errors import InputError

MOST = 2**31 - 1
SLIDING, FULL, WINDOW = "sliding_attention", "full_attention", "sliding_window"
ORIGINAL, PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"
ROPES = "rope_parameters", "rope_scaling"  # the new key and the old one


class Rotation(dict[str, Any]):
    """Rope settings within a config; `read` has the names of those that were asked for."""

    def __init__(self, values: Any, read: set[str]) -> None:
        super().__init__(values if isinstance(values, dict) else {})
        self.read = read

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(f"{ROPES[0]}.{key}")
        return super().get(key, default)


@dataclass(frozen=True, slots=True)
class Given:
    """A config.json; a null value counts as missing.

    read   names of the keys that were asked for
    notes  what the file's readers do otherwise
    """

    path: Path
    values: Mapping[str, Any]
    read: set[str] = field(default_factory=set, compare=False)
    notes: list[str] = field(default_factory=list, compare=False)

    def wrong(self, key: str, value: Any, right: str) -> InputError:
        shown = "missing" if value is None else " ".join(repr(value).split())[:80]
        return InputError(f"{self.path}: {key} is {shown}; it must be {right}")

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def stated(self, key: str, default: Any = None) -> Any:
        """A value whose null says something."""
        self.read.add(key)
        return self.values.get(key, default)

    def unread(self) -> Iterator[tuple[str, Any]]:
        """The keys that nothing asked for with their values, those of rope behind the name of their object."""
        for key, value in self.values.items():
            if key not in self.read:
                yield key, value
            elif key in ROPES and isinstance(value, dict):
                full = value.get(FULL)
                for name, inner in (value | (full if isinstance(full, dict) else {})).items():
                    if f"{ROPES[0]}.{name}" not in self.read:
                        yield f"{key}.{name}", inner

    def renamed(self, names: Mapping[str, tuple[str, ...]]) -> "Given":
        """With the values of other keys, the first that is there, where a key is missing."""
        values = dict(self.values)
        for key, aliases in names.items():
            for alias in aliases:
                if values.get(key) in (None, values.get(alias)) and values.get(alias) is not None:
                    values[key] = self.get(alias)
        return Given(self.path, values, self.read, self.notes)

    def but(self, **values: Any) -> "Given":
        """With these values instead."""
        return Given(self.path, {**self.values, **values}, self.read, self.notes)

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

    def kinds(self, blocks: int, *allowed: str, every: bool = False) -> list[str]:
        """What each block is, by `layer_types`: one of these; with `every` all of them are somewhere."""
        kinds = self.get("layer_types")
        sound = (
            isinstance(kinds, list) and len(kinds) == blocks and all(k in allowed for k in kinds)
        )
        if not sound or (every and any(kind not in kinds for kind in allowed)):
            right = f"{blocks} times {' or '.join(allowed)}{', each somewhere' if every else ''}"
            raise self.wrong("layer_types", kinds, right)
        return list(kinds)

    def windows(self, blocks: int, required: bool = False) -> list[bool]:
        """Whether each block has a window, by `layer_types` or the pattern; none if the config says nothing."""
        types, pattern = self.get("layer_types"), self.get("sliding_window_pattern")
        if types is not None or required:
            return [kind == SLIDING for kind in self.kinds(blocks, SLIDING, FULL)]
        if isinstance(pattern, str) and pattern:
            return [pattern[i % len(pattern)] == "L" for i in range(blocks)]
        if type(pattern) is int and pattern > 0:
            return [(i + 1) % pattern != 0 for i in range(blocks)]
        return []

    def windows_every(self, every: int, blocks: int) -> None:
        """Refuse other windows than in all blocks but every N-th."""
        expected = [(i + 1) % every != 0 for i in range(blocks)]
        if self.windows(blocks) not in ([], expected):
            right = f"windows but for every {every}th block"
            raise self.wrong("layer_types", self.get("layer_types"), right)

    def within(self, used: bool) -> int:
        """The window; 0 if it is not used."""
        has_window = self.get(WINDOW) not in (None, 0)
        return self.size(WINDOW) if self.flag("use_sliding_window", used) and has_window else 0

    # ---- rope

    def rotation(self) -> Rotation:
        """The rope settings of the config, under the old key, which transformers prefers, or the new one."""
        new, old = (self.get(key) or {} for key in ROPES)
        if not isinstance(new, dict) or not isinstance(old, dict):
            raise self.wrong("rope_scaling", old or new, "an object")
        if new and old and new != old:
            raise self.wrong("rope_scaling", old, "left out beside rope_parameters, or equal")
        return Rotation(old or new, self.read)

    def full_rotation(self) -> Rotation:
        """Rope settings of layers without a window; the base is here or in the config itself."""
        rotation = self.rotation()
        inner = rotation.get(FULL)
        rotation = Rotation(inner, self.read) if isinstance(inner, dict) else rotation
        return Rotation({"rope_theta": self.get("rope_theta"), **rotation}, self.read)

    def near_base(self, default: float = 10_000.0) -> float:
        """The base of rope in layers with a window, where it is not scaled."""
        inner, new = self.rotation().get(SLIDING), self.get(ROPES[0])
        if new and FULL not in new:
            raise self.wrong(ROPES[0], new, f"an object with {FULL} and {SLIDING}")
        settings = inner if isinstance(inner, dict) else {}
        base = self.get("rope_local_base_freq", default)
        for key, value in settings.items():
            if key == "rope_theta":
                base = base if value is None else value
            elif value not in (None, "default", 1.0):
                right = "left out or default: layers with a window have plain rope"
                raise self.wrong(f"rope_parameters.{SLIDING}.{key}", value, right)
        return self.number("rope_local_base_freq", base)

    def base(self, default: float) -> float:
        """The base of rope's frequencies; default 0: the config must say it."""
        base = self.full_rotation().get("rope_theta")
        return self.number("rope_theta", (default or None) if base is None else base)

    def scaling(self) -> str:
        """The type of rope scaling; "default" is none."""
        rotation = self.full_rotation()
        new, old = rotation.get("rope_type"), rotation.get("type")
        kind = str((old if new is None else new) or "default")
        return "longrope" if kind == "su" else kind  # its former name

    def turned(self, head_width: int, default: float = 1.0) -> int:
        """How many elements of a head are rotated."""
        share = self.full_rotation().get(PARTIAL)
        share = self.get(PARTIAL, default) if share is None else share
        return int(self.number(PARTIAL, share) * head_width)
