"""Batches as a pure function of an index: a resumed run needs only the index.

Turns tokens into inputs of `transformer.loss`; `weights` is 1 for a target in the loss, and 0 for padding and the step
from one document to the next. It knows no model and no optimizer.
"""

import numpy as np

from packtrain.data.text import DocumentTokens
from packtrain.training.epoch_order import RoundKeys, item_at, round_keys

OFFSET_SALT = 1  # salt of the offset at which an epoch begins to read


class TextBatches:
    """Windows of `time` tokens, `rows` to a batch; the index runs on through the epochs.

    fill            windows run over the whole stream, and a short document is followed by the next one in its row;
                    otherwise each document starts a new window and its last window is padded
    shuffle         each epoch visits the windows in a new random order; otherwise in file order
    random_offsets  with fill and shuffle: each epoch reads the stream as a ring from a new random offset, and leaves
                    out the one target that would close the ring
    """

    def __init__(
        self,
        tokens: DocumentTokens,
        rows: int,
        time: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        random_offsets: bool = True,
        fill: bool = True,
    ) -> None:
        self.tokens, self.rows, self.time = tokens, rows, time
        self.seed, self.shuffle, self.fill = seed, shuffle, fill
        self.shuffle_key = 0
        self.random_offsets = random_offsets and shuffle and fill
        self.size = len(tokens.ids)
        end_offsets = np.append(tokens.starts[1:], self.size) if not fill else np.array([self.size])
        self._stretch_starts = np.asarray(tokens.starts) if not fill else np.zeros(1, np.int64)
        # targets of each stretch that a window must stay in, and the first window of each
        self._stretch_targets = end_offsets - self._stretch_starts - 1
        self._first_windows = np.append(0, np.cumsum(-(-self._stretch_targets // time)))

    @property
    def windows(self) -> int:
        return int(self._first_windows[-1])

    def __len__(self) -> int:
        """Batches in one epoch; the last one is padded."""
        return -(-self.windows // self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """`tokens`, `targets`, `pos`, `seq` i32 and `weights` f32, all (rows, time)."""
        epoch, batch = divmod(index, len(self))
        keys = round_keys(self.seed, epoch, self.shuffle_key)
        offset = item_at(0, self.size, keys, OFFSET_SALT) if self.random_offsets else 0
        window_positions = range(batch * self.rows, (batch + 1) * self.rows)
        rows = [self._make_row(*self._window_at(place, keys, offset)) for place in window_positions]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _window_at(self, window_position: int, keys: RoundKeys, offset: int) -> tuple[int, int]:
        """Return the start in the stream and the number of targets of the window at a position of the epoch."""
        if window_position >= self.windows:
            return 0, 0
        window = item_at(window_position, self.windows, keys) if self.shuffle else window_position
        stretch = int(np.searchsorted(self._first_windows, window, side="right")) - 1
        skipped = (window - int(self._first_windows[stretch])) * self.time
        num_targets = min(self.time, int(self._stretch_targets[stretch]) - skipped)
        return int(self._stretch_starts[stretch]) + skipped + offset, num_targets

    def _make_row(self, token_start: int, count: int) -> dict[str, np.ndarray]:
        """Build the row of `count` targets after `token_start`; the rest is padding, as a separate document."""
        positions = (token_start + np.arange(count + 1)) % self.size
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
            "tokens": padded(ids[:-1], np.int32),
            "targets": padded(ids[1:], np.int32),
            "weights": padded(~is_document_start[1:], np.float32),
            "pos": (indices - np.maximum.accumulate(np.where(news, indices, 0))).astype(np.int32),
            "seq": (np.cumsum(news) - 1).astype(np.int32),
        }
