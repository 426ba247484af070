"""An open GGUF file, whole or split into `NAME-00001-of-00003.gguf` and so on; opens all parts, given any one."""

import mmap
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.gguf.gguf_format import MAGIC, Entry, GGUFError, Value
from packtrain.gguf.gguf_parser import Part, shortened
from packtrain.gguf.path_advice import missing_model, other_content

# llama.h, llama_split_path; gguf-split.cpp
PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"


class GGUF:
    """An open file: `metadata` by key, `entries` by tensor name; `array(name)` maps a tensor without a copy.

    Of a split file all parts are open, the metadata is that of the first, and `path` is the first's, too.
    Raises GGUFError for anything invalid; nothing is allocated by a count that the file could not hold.
    """

    def __init__(self, path: str | Path) -> None:
        self._parts = _parts(Path(path))
        self.path = self._parts[0].path
        self.values = self._parts[0].values
        self.entries = {
            name: replace(e, part=i) if i else e
            for i, part in enumerate(self._parts)
            for name, e in part.entries.items()
        }
        self.nbytes = sum(part.nbytes for part in self._parts)

    @property
    def metadata(self) -> dict[str, Any]:
        return {key: value.value for key, value in self.values.items()}

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that were opened, in order."""
        return tuple(part.path for part in self._parts)

    def array(self, name: str) -> np.ndarray:
        """The tensor's values, read-only; of block types an array of blocks (see dtypes)."""
        e = self.entries[name]
        data = self._parts[e.part].data
        return np.ndarray(e.dtype.array_shape(e.shape), e.dtype.numpy, data, e.offset)

    def close(self) -> None:
        """Let go of the file, which is unmapped when no array of it is left, those of the metadata included.

        No tensor can be read afterwards.
        """
        for part in self._parts:
            part.data = b""


def _opened(path: Path) -> Part:
    """The file, mapped."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise GGUFError(f"{path}: is not a regular file; a GGUF file must be one")
        with open(path, "rb") as file:
            nothing = not file.read(1)  # an empty file cannot be mapped
            data = b"" if nothing else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise GGUFError(f"{path}: cannot be read: {reason}{missing_model(path)}") from None
    if data[:4] != MAGIC and (advice := other_content(path, data[:512])):
        raise GGUFError(f"{path}: this is not a GGUF file{advice}")
    return Part(path, data)


def _parts(path: Path) -> list[Part]:
    """All parts in order, each checked; a file that is not split is one part."""
    first_part = _opened(path)
    count = _number(first_part, COUNT, 1)
    if count <= 1:
        return [first_part]
    named = PART_NAME.fullmatch(path.name)
    if named is None or int(named[3]) != count:
        raise GGUFError(
            f"{path}: {COUNT} is {count}; the file must be called NAME-00001-of-{count:05d}.gguf and so on"
        )
    parts: list[Part] = []
    total = 0
    for i in range(count):
        part_path = path.with_name(f"{named[1]}-{i + 1:05d}-of-{count:05d}.gguf")
        part = first_part if part_path == path else _opened(part_path)
        _check_place(part, i, count)
        total += len(part.entries)
        parts.append(part)
    _check_together(parts, total)
    return parts


def _number(part: Part, key: str, default: int) -> int:
    value = part.values.get(key, Value("u16", default)).value
    if isinstance(value, bool) or not isinstance(value, int):
        raise GGUFError(f"{part.path}: {key} is not a whole number; it must be one")
    return value


def _check_place(part: Part, i: int, count: int) -> None:
    for key, expected in ((COUNT, count), (NUMBER, i)):
        actual = _number(part, key, -1)
        if actual != expected:
            shown = actual if key in part.values else "missing"
            raise GGUFError(
                f"{part.path}: {key} is {shown}; in part {i + 1} of {count} it must be {expected}"
            )


def _check_together(parts: list[Part], total: int) -> None:
    first, seen = parts[0], dict[str, Entry]()
    announced = _number(first, TENSORS, total)
    if announced != total:
        raise GGUFError(
            f"{first.path}: {TENSORS} is {announced}, and the parts have {total} tensors together;"
            " they must be parts of one file"
        )
    for part in parts:
        duplicate = next((name for name in part.entries if name in seen), None)
        if duplicate is not None:
            raise GGUFError(
                f"{part.path}: tensor {shortened(duplicate)} is also in an earlier part;"
                " the parts must be those of one file"
            )
        seen |= part.entries
