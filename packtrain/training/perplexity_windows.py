"""Windows of one long text, cut as in llama-perplexity; batches of them are inputs of `transformer.loss`.

The text is not split into documents. BOS replaces the first token of a window, and only predictions in its second half
are scored, so that each has at least half a window of context. An incomplete window at the end is not measured."""

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packtrain.common.errors import DoesNotFit
from packtrain.common.memory import parse_size, private_nbytes
from packtrain.data.text.documents import SourceFile, read_documents
from packtrain.data.text.reading_report import ReadingReport
from packtrain.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PerplexityWindows:
    """`rows` windows of `context` tokens to a batch, in order; the last batch is padded with empty rows.

    ids  (N,) i32, tokens of the whole text
    bos  replaces a window's first token; None keeps that token
    """

    ids: np.ndarray
    bos: int | None
    rows: int
    context: int

    @property
    def windows(self) -> int:
        return len(self.ids) // self.context

    @property
    def time(self) -> int:
        """Input tokens of a row: the last token of a window is only a target."""
        return self.context - 1

    @property
    def skipped(self) -> int:
        """Positions at the beginning of a row whose predictions are not scored: half a window."""
        return self.context // 2

    def __len__(self) -> int:
        return -(-self.windows // self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return `tokens`, `pos`, `seq` i32 (rows, time); `targets` i32, `weights` f32 (rows, time - skipped)."""
        window_numbers = range(index * self.rows, min((index + 1) * self.rows, self.windows))
        ids = np.zeros((self.rows, self.context), np.int32)
        weights = np.zeros((self.rows, self.time - self.skipped), np.float32)
        for row, window_number in enumerate(window_numbers):
            ids[row] = self.ids[window_number * self.context : (window_number + 1) * self.context]
            weights[row] = 1
        if self.bos is not None:
            ids[:, 0] = self.bos
        return {
            "tokens": ids[:, :-1].copy(), "targets": ids[:, self.skipped + 1 :].copy(), "weights": weights,
            "pos": np.tile(np.arange(self.time, dtype=np.int32), (self.rows, 1)),
            "seq": np.zeros((self.rows, self.time), np.int32),
        }  # fmt: skip


def read_single_text(
    path: Path, separator: str | None, tokenizer: Tokenizer, memory: str | None = None
) -> np.ndarray | None:
    """Tokenize a file as one text, (N,) i32; None if it holds several documents, as `separator` divides it.

    Reads as llama-perplexity does: BOS if the model's file asks for it, control tokens stay text, line ends stay, and
    the last line feed is dropped. In documents shorter than a window, the window's second half would say nothing
    about context, and the separator would be scored as text. Raises DoesNotFit if the tokens need more than `memory`.
    """
    sources, reading_report = [SourceFile(path)], ReadingReport(path, keep_line_ends=True)
    if sum(piece.is_last for piece in read_documents(sources, separator, [reading_report])) > 1:
        return None
    ids = array("i", [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else [])
    pieces = (piece.text for piece in read_documents(sources, separator, [reading_report]))
    max_nbytes = math.inf if memory is None else parse_size(memory, "--memory") - private_nbytes()
    for piece_ids in tokenizer.encode_pieces(_strip_last_break(pieces)):
        ids.extend(piece_ids)
        if 2 * ids.itemsize * len(ids) > max_nbytes:  # an array that grows is copied
            raise DoesNotFit(
                f"--memory: {memory} is too small for the tokens of {path}", "give more memory, or a smaller text",
            )  # fmt: skip
    return np.frombuffer(ids, np.int32)


def _strip_last_break(pieces: Iterable[str]) -> Iterator[str]:
    pending = ""
    for piece in pieces:
        pending += piece
        yield pending[:-1]
        pending = pending[-1:]
    yield pending.removesuffix("\n")
