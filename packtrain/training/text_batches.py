"""Batches of running text: windows over documents, one after the other, as inputs of `transformer.loss`.

`weights` is 1 for a target in the loss, and 0 for padding and the step from one document to the next."""

import numpy as np

from packtrain.data.text import DocumentTokens
from packtrain.training.epoch_order import RoundKeys, item_at, items_at
from packtrain.training.indexed_batches import Batch, IndexedBatches

OFFSET_SALT = 1  # salt of the offset at which an epoch begins to read
BLOCK = 16  # documents of a block: a place in the shuffled stream is found by the first places of blocks
CHUNK = 512 * BLOCK  # documents whose order is computed at a time


class TextBatches(IndexedBatches):
    """Windows of `time` tokens.

    fill            windows run over the whole text, and a short document is followed by the next one in its row;
                    otherwise each document starts a new window and its last window is padded
    shuffle         otherwise the windows are in file order
    random_offsets  with fill and shuffle: each epoch reads the text as a ring from a new random offset, and leaves
                    out the one target that would close the ring
    shuffle_samples  with fill and shuffle: the text of each epoch has the documents in a new random order, so that
                    other documents share a window
    """

    def __init__(
        self, tokens: DocumentTokens, rows: int, time: int, *, seed: int = 0, shuffle: bool = True,
        random_offsets: bool = True, fill: bool = True, shuffle_samples: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(rows, time, seed, shuffle, shuffle_samples and fill)
        self.tokens, self.fill = tokens, fill
        self.random_offsets = random_offsets and shuffle and fill
        self._ordered_keys: RoundKeys = ()  # of the epoch in whose stream blocks begin at these places
        self._block_starts = np.zeros(-(-len(tokens.starts) // BLOCK), np.int64)
        self.size = len(tokens.ids)
        end_offsets = np.append(tokens.starts[1:], self.size) if not fill else np.array([self.size])
        self._stretch_starts = np.asarray(tokens.starts) if not fill else np.zeros(1, np.int64)
        # targets of each stretch that a window must stay in, and the first window of each
        self._stretch_targets = end_offsets - self._stretch_starts - 1
        self._first_windows = np.append(0, np.cumsum(-(-self._stretch_targets // time)))

    @property
    def windows(self) -> int:
        """Rows of an epoch: windows of all documents."""
        return int(self._first_windows[-1])

    def row_at(self, position: int, keys: RoundKeys) -> Batch:
        return self._make_row(*self._window_at(position, keys), keys)

    def _window_at(self, position: int, keys: RoundKeys) -> tuple[int, int]:
        """Return the index in the epoch's text at which the window at a position starts, and its number of targets."""
        if position >= self.windows:
            return 0, 0
        offset = item_at(0, self.size, keys, OFFSET_SALT) if self.random_offsets else 0
        window = item_at(position, self.windows, keys) if self.shuffle else position
        stretch = int(np.searchsorted(self._first_windows, window, side="right")) - 1
        skipped = (window - int(self._first_windows[stretch])) * self.time
        num_targets = min(self.time, int(self._stretch_targets[stretch]) - skipped)
        return int(self._stretch_starts[stretch]) + skipped + offset, num_targets

    def _shuffled_positions(self, token_start: int, count: int, keys: RoundKeys) -> np.ndarray:
        """Return the file positions of `count` tokens from `token_start` on in the epoch's shuffled text, a ring."""
        if keys != self._ordered_keys:
            # the place in the epoch's stream at which each block of documents begins
            place = 0
            for first in range(0, len(self.tokens.starts), CHUNK):
                _, lengths = self._shuffled_documents(first, CHUNK, keys)
                block_lengths = np.add.reduceat(lengths, np.arange(0, len(lengths), BLOCK))
                block_ends, at = place + np.cumsum(block_lengths), first // BLOCK
                self._block_starts[at : at + len(block_ends)] = block_ends - block_lengths
                place = int(block_ends[-1])
            self._ordered_keys = keys
        num_blocks, token_start = len(self._block_starts), token_start % self.size
        block = int(np.searchsorted(self._block_starts, token_start, side="right")) - 1
        places = token_start - int(self._block_starts[block]) + np.arange(count)
        starts = lengths = np.zeros(0, np.int64)
        while lengths.sum() <= places[-1]:
            block_starts, block_lengths = self._shuffled_documents(block * BLOCK, BLOCK, keys)
            starts, lengths = np.append(starts, block_starts), np.append(lengths, block_lengths)
            block = (block + 1) % num_blocks
        place_ends = np.cumsum(lengths)
        document = np.searchsorted(place_ends, places, side="right")
        return np.asarray(starts[document] + places - (place_ends - lengths)[document])

    def _shuffled_documents(
        self, first: int, count: int, keys: RoundKeys
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return starts in the file, and lengths, of `count` documents, from number `first` of the epoch's order."""
        starts = self.tokens.starts
        documents = items_at(np.arange(first, min(first + count, len(starts))), len(starts), keys)
        next_starts = starts[(documents + 1) % len(starts)]
        next_starts[documents + 1 == len(starts)] = self.size
        return starts[documents], next_starts - starts[documents]

    def _make_row(self, token_start: int, count: int, keys: RoundKeys) -> Batch:
        """Build a row of `count` targets after index `token_start` of the text; the rest, padding, is a document."""
        positions = (token_start + np.arange(count + 1)) % self.size
        if self.shuffle_samples:
            positions = self._shuffled_positions(token_start, count + 1, keys)
        document_indices = np.searchsorted(self.tokens.starts, positions, side="right") - 1
        is_document_start = self.tokens.starts[document_indices] == positions
        ids = self.tokens.ids[positions].astype(np.int32)
        padding = self.time - count

        def padded(values: np.ndarray, dtype: type) -> np.ndarray:
            return np.append(values, np.zeros(padding, values.dtype)).astype(dtype)

        indices = np.arange(self.time)
        news = padded(is_document_start[:-1], bool)
        news[[0, *([count] if padding else [])]] = True
        return {
            "tokens": padded(ids[:-1], np.int32), "targets": padded(ids[1:], np.int32),
            "weights": padded(~is_document_start[1:], np.float32),
            "pos": (indices - np.maximum.accumulate(np.where(news, indices, 0))).astype(np.int32),
            "seq": (np.cumsum(news) - 1).astype(np.int32),
        }  # fmt: skip
