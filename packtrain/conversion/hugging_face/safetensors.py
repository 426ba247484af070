"""Maps tensors of a safetensors checkpoint, one file or several with an index, with every bound checked.

A file is a length in 8 bytes, that many bytes of JSON (name -> dtype, shape, data_offsets), and raw bytes. It is
read here because that is all of the format; the package for it would only add another copy."""

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.files import atomic_file
from packtrain.conversion.hugging_face.plain_checkpoint import parse_json_object, read_json
from packtrain.dtypes import Dtype, bf16, f16, f32

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
FILE_SUFFIXES = (".safetensors",), (".bin", ".pth", ".pt")
LENGTH_NBYTES, MAX_HEADER_NBYTES = 8, 100_000_000  # the format itself limits the header
READABLE_TYPES = {"F32": f32, "F16": f16, "BF16": bf16}
# bytes per element of every type of the format; more than half of them cannot be read as weights
NBYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """A tensor in a file; `array` maps it as f32, f16 or records of bf16."""

    path: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    data_start: int
    data: Any

    @property
    def dtype(self) -> Dtype:
        if self.kind not in READABLE_TYPES:
            fact = f"{self.path}: {self.name} is of type {self.kind}; it must be F32, F16 or BF16"
            raise InputError(fact)
        return READABLE_TYPES[self.kind]

    def byte_array(self) -> np.ndarray:
        """Map a tensor of type U8. Raises InputError for another type."""
        if self.kind != "U8":
            raise InputError(f"{self.path}: {self.name} is of type {self.kind}; it must be U8")
        return np.ndarray(self.shape, np.uint8, self.data, self.data_start)

    def has_same_bytes(self, peer: "SafetensorsTensor") -> bool:
        """Whether both tensors have equal type, shape and bytes."""
        if (self.kind, self.shape) != (peer.kind, peer.shape):
            return False
        num_bytes = math.prod(self.shape) * NBYTES[self.kind]
        own_bytes, other_bytes = (
            np.ndarray((num_bytes,), np.uint8, s.data, s.data_start) for s in (self, peer)
        )
        return np.array_equal(own_bytes, other_bytes)

    def array(self) -> np.ndarray:
        return np.ndarray(self.shape, self.dtype.numpy, self.data, self.data_start)


def open_tensors(folder: Path) -> dict[str, SafetensorsTensor]:
    """Return every tensor of the checkpoint in a folder, by name. Raises InputError."""
    if (folder / SINGLE_FILE).exists():
        return open_file(folder / SINGLE_FILE)
    if not (folder / INDEX_FILE).exists():
        raise InputError(_missing_message(folder / SINGLE_FILE))
    path = folder / INDEX_FILE
    places = read_json(path).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(f, str) for f in places.values()):
        raise InputError(f"{path}: weight_map must be an object of file names")
    bad_paths = [file_name for file_name in places.values() if Path(file_name).name != file_name]
    if bad_paths:
        fact = f"{path}: {bad_paths[0]!r} is not a file of this folder"
        raise InputError(f"{fact}; it must be a name without folders")
    tensors: dict[str, SafetensorsTensor] = {}
    for file_name in dict.fromkeys(places.values()):
        tensors |= open_file(folder / file_name)
    missing = [name for name in places if name not in tensors]
    if missing:
        fact = f"{folder / places[missing[0]]}: tensor {missing[0]} is missing"
        raise InputError(f"{fact}; {INDEX_FILE} lists it")
    return tensors


def _missing_message(path: Path) -> str:
    """Return an error's text for a missing file: which files its folder has instead, and what to do."""
    shards, pickled = (
        sorted(n for e in suffixes for n in path.parent.glob(f"*{e}")) for suffixes in FILE_SUFFIXES
    )
    if pickled and not shards:
        remedy = "load it with transformers or PEFT, and save it by save_pretrained"
        return f"{pickled[0]}: pickled tensors are not read; {remedy}, which writes {path.name}"
    if shards and path.name == SINGLE_FILE:
        return f"{shards[0]}: it is one of several files, and {INDEX_FILE}, which lists them, is missing; get all"
    return f"{path}: is missing; tensors must be in safetensors files"


def open_file(path: Path) -> dict[str, SafetensorsTensor]:
    """Return every tensor of one file, by name. Raises InputError."""
    try:
        with open(path, "rb") as file:
            length_bytes = file.read(LENGTH_NBYTES)
            if len(length_bytes) < LENGTH_NBYTES:
                raise InputError(f"{path}: {len(length_bytes)} bytes are not a safetensors file")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise InputError(_missing_message(path)) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {str(error.strerror).lower()}") from None
    header_nbytes = int.from_bytes(length_bytes, "little")
    data_start = LENGTH_NBYTES + header_nbytes
    if header_nbytes > MAX_HEADER_NBYTES or data_start > len(data):
        fact = f"{path}: its header should have {header_nbytes} bytes, and the file has {len(data)}"
        raise InputError(fact)
    header = parse_json_object(path, data[LENGTH_NBYTES:data_start], "its header")
    header.pop("__metadata__", None)
    return {name: _entry(path, data, data_start, name, about) for name, about in header.items()}


def _entry(path: Path, data: Any, data_start: int, name: str, about: Any) -> SafetensorsTensor:
    """Return tensor `name`, described by the header's `about`, checked against `data`; tensors begin at data_start."""
    about = about if isinstance(about, dict) else {}
    dtype_name, shape, offsets = (about.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype_name, str) or dtype_name not in NBYTES:
        fact = f"{path}: {name}: dtype is {dtype_name!r}; it must be one of {', '.join(NBYTES)}"
        raise InputError(fact)
    if not (_is_size_list(shape) and _is_size_list(offsets) and len(offsets) == 2):
        raise InputError(f"{path}: {name}: shape and data_offsets must be lists of sizes")
    first, end_offset = offsets
    nbytes = math.prod(shape) * NBYTES[dtype_name]
    if end_offset - first != nbytes or data_start + end_offset > len(data):
        raise InputError(
            f"{path}: {name}: bytes {first} to {end_offset} of {len(data) - data_start} cannot hold {dtype_name}{shape}"
        )
    return SafetensorsTensor(path, name, dtype_name, tuple(shape), data_start + first, data)


def _is_size_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)


def write_file(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write f32 tensors to a safetensors file, atomically."""
    header, at = dict[str, Any](), 0
    for name, tensor_values in tensors.items():
        end = at + tensor_values.size * NBYTES["F32"]
        header[name] = {"dtype": "F32", "shape": tensor_values.shape, "data_offsets": (at, end)}
        at = end
    header_bytes = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    header_bytes += b" " * (-len(header_bytes) % LENGTH_NBYTES)
    with atomic_file(path) as file:
        file.write(len(header_bytes).to_bytes(LENGTH_NBYTES, "little") + header_bytes)
        for tensor_values in tensors.values():
            file.write(np.ascontiguousarray(tensor_values, "<f4").tobytes())
