"""Token files: the ids of all documents one after the other, and where each document begins, as mapped .npy files."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from packtrain.files import replacing
from packtrain.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Tokens:
    """Documents as BOS … EOS.

    ids     (N,)          u16, or u32 for a vocabulary of more than 65,536 tokens; mapped, read-only
    starts  (documents,)  i64, mapped: the places in ids where documents begin
    """

    ids: np.ndarray
    starts: np.ndarray


def read_tokens(folder: Path, part: str, vocab_size: int) -> Tokens:
    """Map the files of a part. Raises OSError or ValueError if they are not there, not whole, or make no sense."""
    ids, starts = (np.lib.format.open_memmap(path, mode="r") for path in _paths(folder, part))
    if ids.dtype.kind != "u" or starts.dtype != np.int64 or ids.ndim != 1 or starts.ndim != 1:
        raise ValueError(f"{folder}: {part} holds no tokens")
    ordered = starts.size > 0 and starts[0] == 0 and bool((np.diff(starts) > 0).all())
    if not ordered or starts[-1] >= ids.size or int(ids.max()) >= vocab_size:
        raise ValueError(f"{folder}: {part} is damaged")
    return Tokens(ids, starts)


def _paths(folder: Path, part: str) -> tuple[Path, Path]:
    return folder / f"{part}.npy", folder / f"{part}.starts.npy"


class TokenFile:
    """A file of ids while it is written, document by document; the tokenizer must have bos and eos."""

    def __init__(self, file: BinaryIO, tokenizer: Tokenizer) -> None:
        self.starts = array("q")
        self.count = 0
        self._file, self._bos, self._eos = file, tokenizer.bos, tokenizer.eos
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        self._write_header()

    def _write_header(self) -> None:
        # NumPy leaves room for any count, so that the header can be written again in its place
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def add_document(self, ids: Iterable[list[int]]) -> None:
        self.starts.append(self.count)
        self._write([self._bos])
        for part in ids:
            self._write(part)
        self._write([self._eos])

    def _write(self, ids: Sequence[int | None]) -> None:
        self._file.write(np.array(ids, self._dtype).tobytes())
        self.count += len(ids)

    def finish(self) -> None:
        self._file.seek(0)
        self._write_header()


@contextmanager
def write_tokens(folder: Path, part: str, tokenizer: Tokenizer) -> Iterator[TokenFile]:
    """`with write_tokens(…) as file:` the files of a part, there once the block has ended well."""
    ids_path, starts_path = _paths(folder, part)
    with replacing(ids_path) as file:
        made = TokenFile(file, tokenizer)
        yield made
        made.finish()
    with replacing(starts_path) as file:
        np.save(file, np.frombuffer(made.starts, "<i8"))
