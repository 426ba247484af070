"""Token files: ids of documents or samples in sequence, where each begins, weights of samples; mapped .npy files."""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from packtrain.common.files import atomic_file


@dataclass(frozen=True, slots=True)
class DocumentTokens:
    """Token ids of documents, each BOS … EOS.

    ids     (N,)          u16, or u32 for a vocabulary of more than 65,536 tokens; mapped, read-only
    starts  (documents,)  i64, mapped: where each document begins in ids
    """

    ids: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True, slots=True)
class TokenizedSamples:
    """Tokenized samples.

    ids            (N,)        u16 or u32, mapped, read-only
    weights        (N,)        u8, mapped: 1 for a target in the loss
    sample_starts  (samples,)  i64, mapped: where each sample begins in ids
    """

    ids: np.ndarray
    weights: np.ndarray
    sample_starts: np.ndarray

    def __len__(self) -> int:
        return len(self.sample_starts)

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each sample, (samples,) i64."""
        return np.diff(self.sample_starts, append=self.ids.size)

    @property
    def targets(self) -> int:
        """Return the number of targets in the loss; the first token of a sample is no target."""
        return int(self.weights.sum(dtype=np.int64)) - int(self.weights[self.sample_starts].sum())

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, loss weights of these ids) of one sample."""
        start = int(self.sample_starts[i])
        end = int(self.sample_starts[i + 1]) if i + 1 < len(self.sample_starts) else self.ids.size
        return self.ids[start:end], self.weights[start:end]


def read_tokens(folder: Path, split: str, vocab_size: int) -> DocumentTokens:
    """Map the files of a split, ids below `vocab_size`. Raises OSError or ValueError if they are missing or damaged."""
    ids, starts = (np.lib.format.open_memmap(path, mode="r") for path in token_paths(folder, split))
    if ids.dtype.kind != "u" or starts.dtype != np.int64 or ids.ndim != 1 or starts.ndim != 1:
        raise ValueError(f"{folder}: {split} holds no tokens")
    is_ordered = starts.size > 0 and starts[0] == 0 and bool((np.diff(starts) > 0).all())
    if not is_ordered or starts[-1] >= ids.size or int(ids.max()) >= vocab_size:
        raise ValueError(f"{folder}: {split} is damaged")
    return DocumentTokens(ids, starts)


def read_samples(folder: Path, split: str, vocab_size: int) -> TokenizedSamples:
    """Map the files of a split, ids below `vocab_size`. Raises OSError or ValueError if they are missing or damaged."""
    tokens = read_tokens(folder, split, vocab_size)
    weights = np.lib.format.open_memmap(weights_path(folder, split), mode="r")
    if weights.dtype != np.uint8 or weights.shape != tokens.ids.shape or int(weights.max()) > 1:
        raise ValueError(f"{folder}: {split} is damaged")
    return TokenizedSamples(tokens.ids, weights, tokens.starts)


def token_paths(folder: Path, split: str) -> tuple[Path, Path]:
    return folder / f"{split}.npy", folder / f"{split}.starts.npy"


def weights_path(folder: Path, split: str) -> Path:
    return folder / f"{split}.weights.npy"


class ArrayFile:
    """Writes a one-dimensional .npy file."""

    def __init__(self, file: BinaryIO, dtype: np.dtype[Any]) -> None:
        self.count = 0
        self._file, self._dtype = file, dtype
        self._write_header()

    def _write_header(self) -> None:
        # NumPy pads the header for any count, so that it can be rewritten in place
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self._file, header)

    def write(self, values: Sequence[int | None] | np.ndarray) -> None:
        self._file.write(np.array(values, self._dtype).tobytes())
        self.count += len(values)

    def finish(self) -> None:
        self._file.seek(0)
        self._write_header()


@contextmanager
def growing(path: Path, dtype: np.dtype[Any]) -> Iterator[ArrayFile]:
    """Context manager: a new .npy file to append numbers to, which appears at `path` only if the block succeeds."""
    with atomic_file(path) as file:
        array_file = ArrayFile(file, dtype)
        yield array_file
        array_file.finish()


class TokenFile:
    """Writes the ids of documents to a file, one document after another, and a weight of each id, if they have any."""

    def __init__(self, ids: ArrayFile, weights: ArrayFile | None) -> None:
        self.starts, self._ids, self._weights = array("q"), ids, weights

    @property
    def num_tokens(self) -> int:
        return self._ids.count

    def begin_document(self) -> None:
        self.starts.append(self.num_tokens)

    def write(
        self, ids: Sequence[int | None] | np.ndarray, weights: Sequence[int] | None = None
    ) -> None:
        self._ids.write(ids)
        if self._weights is not None and weights is not None:
            self._weights.write(weights)


@contextmanager
def write_tokens(
    folder: Path, split: str, vocab_size: int, has_weights: bool = False
) -> Iterator[TokenFile]:
    """Context manager: a TokenFile that writes the files of a split, which appear only if the block succeeds."""
    ids_path, starts_path = token_paths(folder, split)
    weights = growing(weights_path(folder, split), np.dtype("u1")) if has_weights else nullcontext()
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    with growing(ids_path, dtype) as ids_file, weights as weights_file:
        token_file = TokenFile(ids_file, weights_file)
        yield token_file
    with atomic_file(starts_path) as starts_file:
        np.save(starts_file, np.frombuffer(token_file.starts, "<i8"))
