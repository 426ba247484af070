"""Opens a GGUF file, whole or split into `NAME-00001-of-00003.gguf` and so on; opens all parts, given any of them."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.common.mapped_file import MappedFile
from packtrain.gguf.gguf_format import MAGIC, GGUFError, MetadataValue, TensorInfo
from packtrain.gguf.gguf_parser import GGUFPart, shorten_text
from packtrain.gguf.path_advice import content_advice, missing_model

# llama.h, llama_split_path; gguf-split.cpp
PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
PART_INDEX_KEY, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"


class GGUF:
    """An open file: `metadata` by key, `entries` by tensor name; `array(name)` maps a tensor without a copy. All parts
    of a split file are open; `metadata` and `path` are those of the first part. Raises GGUFError for anything invalid;
    nothing is allocated by a count that the file could not hold."""

    def __init__(self, path: str | Path) -> None:
        self._parts = _open_parts(Path(path))
        self.path = self._parts[0].path
        self.values = self._parts[0].values
        infos = [(i, info) for i, part in enumerate(self._parts) for info in part.entries.values()]
        self.entries = {e.name: replace(e, part_index=i) if i else e for i, e in infos}
        self.nbytes = sum(gguf_part.nbytes for gguf_part in self._parts)

    @property
    def metadata(self) -> dict[str, Any]:
        return {key: value.value for key, value in self.values.items()}

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(gguf_part.path for gguf_part in self._parts)

    def array(self, name: str) -> np.ndarray:
        """Map tensor `name`, read-only; of block types, as quantization blocks (see dtypes). Raises KeyError."""
        info = self.entries[name]
        data = self._parts[info.part_index].data
        return np.ndarray(info.dtype.array_shape(info.shape), info.dtype.numpy, data, info.offset)

    def close(self) -> None:
        """Release the file: no tensor can be read afterwards. It is unmapped once no array over it is left."""
        for gguf_part in self._parts:
            gguf_part.data = b""


def _open_part(path: Path) -> GGUFPart:
    """Map and parse one file."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise GGUFError(f"{path}: is not a regular file; a GGUF file must be one")
        with open(path, "rb") as file:
            is_empty = not file.read(1)  # an empty file cannot be mapped
            data = b"" if is_empty else MappedFile(path)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise GGUFError(f"{path}: cannot be read: {reason}{missing_model(path)}") from None
    if data[:4] != MAGIC and (advice := content_advice(path, data[:512])):
        raise GGUFError(f"{path}: this is not a GGUF file{advice}")
    return GGUFPart(path, data)


def _open_parts(path: Path) -> list[GGUFPart]:
    """Open all parts in order, each checked; a file that is not split is one part."""
    first_part = _open_part(path)
    num_parts = _metadata_number(first_part, COUNT, 1)
    if num_parts <= 1:
        return [first_part]
    name_match = PART_NAME.fullmatch(path.name)
    if name_match is None or int(name_match[3]) != num_parts:
        raise GGUFError(
            f"{path}: {COUNT} is {num_parts}; the file must be called NAME-00001-of-{num_parts:05d}.gguf and so on"
        )
    gguf_parts: list[GGUFPart] = []
    num_tensors = 0
    for part_index in range(num_parts):
        part_path = path.with_name(f"{name_match[1]}-{part_index + 1:05d}-of-{num_parts:05d}.gguf")
        gguf_part = first_part if part_path == path else _open_part(part_path)
        for key, expected in ((COUNT, num_parts), (PART_INDEX_KEY, part_index)):
            actual = _metadata_number(gguf_part, key, -1)
            if actual != expected:
                shown = actual if key in gguf_part.values else "missing"
                raise GGUFError(
                    f"{part_path}: {key} is {shown}; in part {part_index + 1} of {num_parts} it must be {expected}"
                )
        num_tensors += len(gguf_part.entries)
        gguf_parts.append(gguf_part)
    _check_split_parts(gguf_parts, num_tensors)
    return gguf_parts


def _metadata_number(part: GGUFPart, key: str, default: int) -> int:
    value = part.values.get(key, MetadataValue("u16", default)).value
    if isinstance(value, bool) or not isinstance(value, int):
        raise GGUFError(f"{part.path}: {key} is not a whole number; it must be one")
    return value


def _check_split_parts(gguf_parts: list[GGUFPart], total: int) -> None:
    first, known_tensors = gguf_parts[0], dict[str, TensorInfo]()
    announced = _metadata_number(first, TENSORS, total)
    if announced != total:
        raise GGUFError(
            f"{first.path}: {TENSORS} is {announced}, and the parts have {total} tensors together;"
            " they must be parts of one file"
        )
    for gguf_part in gguf_parts:
        duplicate = next((name for name in gguf_part.entries if name in known_tensors), None)
        if duplicate is not None:
            raise GGUFError(
                f"{gguf_part.path}: tensor {shorten_text(duplicate)} is also in an earlier part;"
                " the parts must be those of one file"
            )
        known_tensors |= gguf_part.entries
