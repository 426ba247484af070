"""Samples in memory-mapped files: all ids in sequence, a weight for each, and where each sample begins."""

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packtrain.common.files import atomic_file
from packtrain.data.conversations.loss_mask import MaskedSample
from packtrain.data.text.token_files import ArrayFile, growing, id_dtype, paths_of, read_tokens


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
        """Return the ids and weights of one sample."""
        start = int(self.sample_starts[i])
        end = int(self.sample_starts[i + 1]) if i + 1 < len(self.sample_starts) else self.ids.size
        return self.ids[start:end], self.weights[start:end]


def read_samples(folder: Path, split: str, vocab_size: int) -> TokenizedSamples:
    """Map the files of a split. Raises OSError or ValueError if they are missing, incomplete or inconsistent."""
    tokens = read_tokens(folder, split, vocab_size)
    weights = np.lib.format.open_memmap(_weights_path(folder, split), mode="r")
    if weights.dtype != np.uint8 or weights.shape != tokens.ids.shape or int(weights.max()) > 1:
        raise ValueError(f"{folder}: {split} is damaged")
    return TokenizedSamples(tokens.ids, weights, tokens.starts)


def _weights_path(folder: Path, split: str) -> Path:
    return folder / f"{split}.weights.npy"


class SampleFile:
    """Writes the files of a split, sample by sample."""

    def __init__(self, ids: ArrayFile, weights: ArrayFile) -> None:
        self.sample_starts = array("q")
        self._ids, self._weights = ids, weights

    def add(self, sample: MaskedSample) -> None:
        self.sample_starts.append(self._ids.count)
        self._ids.write(sample.ids)
        self._weights.write(sample.weights)


@contextmanager
def write_samples(folder: Path, split: str, vocab_size: int) -> Iterator[SampleFile]:
    """`with write_samples(…) as file:` the files of a split, complete when the block succeeds."""
    ids_path, starts_path = paths_of(folder, split)
    with (
        growing(ids_path, id_dtype(vocab_size)) as ids,
        growing(_weights_path(folder, split), np.dtype("u1")) as weights,
    ):
        file = SampleFile(ids, weights)
        yield file
    with atomic_file(starts_path) as starts_file:
        np.save(starts_file, np.frombuffer(file.sample_starts, "<i8"))
