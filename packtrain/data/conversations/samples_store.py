"""Samples in memory-mapped files: all ids in sequence, a weight for each, and where each sample begins."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packtrain.data.text.token_files import read_tokens, weights_path


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
    weights = np.lib.format.open_memmap(weights_path(folder, split), mode="r")
    if weights.dtype != np.uint8 or weights.shape != tokens.ids.shape or int(weights.max()) > 1:
        raise ValueError(f"{folder}: {split} is damaged")
    return TokenizedSamples(tokens.ids, weights, tokens.starts)
