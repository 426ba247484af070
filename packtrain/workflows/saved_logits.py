"""Predictions of a reference model in a file, which llama-perplexity writes and reads, too (--kl-divergence-base).

    "_logits_" · tokens of a window, tokens of the vocabulary (V), windows, i32 · token ids of all windows, i32 ·
    of each scored position: scale, smallest log-probability, f32 · V codes, u16, and one more if V is odd

log p = scale * code + smallest: code 0 stands for MAX_RANGE below the likeliest token, and less. Little-endian."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.files import atomic_file, require_existing
from packtrain.training.perplexity_windows import PerplexityWindows
from packtrain.training.sample_batches import SampleBatches

Batches = PerplexityWindows | SampleBatches
MAGIC, HEAD_NBYTES = b"_logits_", 20
MAX_RANGE, MAX_CODE = 16.0, 65535  # nats
MIN_LOGPROB = -16.0  # less likely tokens do not count in a divergence


def is_saved_logits(path: Path) -> bool:
    with require_existing(path, "--kl-base").open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


@dataclass(frozen=True, slots=True)
class SavedLogits:
    """A file of log-probabilities.

    context     tokens of a window
    token_ids   (windows * context,) i32
    codes       (N, 4 + V, even) u16, mapped; the first four are scale and smallest log-probability, f32
    """

    path: Path
    context: int
    vocab_size: int
    token_ids: np.ndarray
    codes: np.ndarray

    @staticmethod
    def open(path: Path) -> "SavedLogits":
        """Map a file. Raises InputError if the file does not have as many bytes as its head says."""
        data = np.memmap(path, np.uint8, "r")
        head = np.frombuffer(data[len(MAGIC) : HEAD_NBYTES].tobytes().ljust(12, b"\0"), "<i4")
        context, vocab_size, num_windows = map(int, head)
        ids_end = HEAD_NBYTES + 4 * context * num_windows
        shape = num_windows * (context - 1 - context // 2), _u16_per_position(vocab_size)
        if head.min() < 1 or len(data) != ids_end + 2 * shape[0] * shape[1]:
            raise InputError(f"--kl-base: {path} has {len(data):,} bytes, other than its head says")
        codes = data[ids_end:].view("<u2")
        ids = data[HEAD_NBYTES:ids_end].view("<i4")
        return SavedLogits(path, context, vocab_size, ids, codes.reshape(shape))

    def check(self, batches: PerplexityWindows, vocab_size: int) -> None:
        """Raise InputError unless the file holds predictions for these windows, or for the first of them."""
        check_same_size(self.vocab_size, vocab_size)
        if batches.context != self.context:
            fact = f"--kl-base: the windows of {self.path} have {self.context:,} tokens"
            raise InputError(fact, f"--ctx {self.context} reads such windows")
        if not np.array_equal(self.token_ids, batches.ids[: len(self.token_ids)]):
            fact = f"--kl-base: {self.path} was written for another text or vocabulary"
            raise InputError(fact, "give the same --data")

    def predictions(self) -> Iterator[tuple[np.ndarray, int]]:
        """Yield log-probabilities (V,) f64 at each scored position, and the token that follows there."""
        windows = self.token_ids.reshape(-1, self.context)
        for row, target in zip(self.codes, windows[:, self.context // 2 + 1 :].flat, strict=True):
            scale, smallest = row[:4].view("<f4").astype(float)
            yield scale * row[4 : 4 + self.vocab_size] + smallest, int(target)


def save_logits(
    path: Path, batches: PerplexityWindows, vocab_size: int, predictions: Iterable[tuple[np.ndarray, int]]
) -> None:  # fmt: skip
    """Write a model's predictions at the scored positions of windows: (log-probabilities (V,), next token) for each."""
    ids = batches.ids[: batches.windows * batches.context]
    head = np.array([batches.context, vocab_size, batches.windows], "<i4")
    with atomic_file(path) as file:
        file.write(MAGIC + head.tobytes() + ids.astype("<i4").tobytes())
        for logprobs, _ in predictions:
            file.write(encode_row(logprobs).tobytes())


def encode_row(logprobs: np.ndarray) -> np.ndarray:
    """Return log-probabilities (V,) as the file's u16 row: scale and least value, both f32, then V codes."""
    largest, row = logprobs.max(), np.zeros(_u16_per_position(len(logprobs)), "<u2")
    smallest = max(logprobs.min(), largest - MAX_RANGE)
    scale = (largest - smallest) / MAX_CODE
    row[:4] = np.array([scale, smallest], "<f4").view("<u2")
    if scale:
        row[4 : 4 + len(logprobs)] = np.rint((logprobs - smallest) / scale).clip(0, MAX_CODE)
    return row


def _u16_per_position(vocab_size: int) -> int:
    """Return how many u16 numbers a position has: scale and minimum (4), then V logits, padded to an even number."""
    return 4 + vocab_size + vocab_size % 2


def check_same_size(base_size: int, vocab_size: int) -> None:
    """Raise InputError unless the base of a divergence and a model have vocabularies of equal size."""
    if base_size != vocab_size:
        fact = f"--kl-base: the base and the model have {base_size:,} and {vocab_size:,} tokens"
        raise InputError(fact, "their logits must match")


def windows_of(batches: Batches, flag: str) -> PerplexityWindows:
    """Return `batches` if they are windows of one text. Raises InputError, which names the flag, for others."""
    if not isinstance(batches, PerplexityWindows):
        advice = "give a text file, and --separator '' for several documents"
        raise InputError(f"{flag} needs one text", advice)
    return batches
