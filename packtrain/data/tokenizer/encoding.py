"""The base of all kinds of vocabulary: encodes texts without special tokens word by word, and caches words.

BPE and SentencePiece vocabularies share the loop that merges parts of a word, with different costs."""

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from itertools import pairwise

from packtrain.data.tokenizer.compiled import EncodingTables
from packtrain.data.tokenizer.token_table import TokenTable

SPACE = "\u2581"
CACHED_TEXTS, CACHED_LENGTH = 1 << 16, 64


class Encoding:
    """Encodes text without special tokens, for one kind of vocabulary.

    adds_bos              add a BOS token by default; `adds_eos`: an EOS token
    adds_space            add a space before the text, and after special tokens
    strips_leading_space  decoding removes the space before the text
    always_adds_bos       add BOS, and EOS if it is a default, even where the file says otherwise
    separated             the separator ends a text, not EOS
    cleans_spaces         llama_detokenize removes spaces before punctuation
    has_tables            the compiled encoder supports the vocabulary, by `build_tables`
    normalizers           names of the file's normalizers that are applied
    """

    adds_bos = adds_eos = adds_space = strips_leading_space = always_adds_bos = False
    separated = cleans_spaces = has_tables = False
    normalizers: tuple[str, ...] = ()

    def __init__(self, table: TokenTable) -> None:
        self.table = table
        self._word_cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = []
        for word in self._words(text):
            ids += self._cached_ids(word, self._word_ids)
        return ids

    def _cached_ids(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        ids = self._word_cache.get(text)
        if ids is None:
            ids = encode(text)
            if len(text) <= CACHED_LENGTH and len(self._word_cache) < CACHED_TEXTS:
                self._word_cache[text] = ids
        return ids

    def _words(self, text: str) -> Iterable[str]:
        """Split a text into words whose ids depend on nothing else."""
        return (text,)

    def _word_ids(self, word: str) -> list[int]:
        raise NotImplementedError

    def raw(self, text: str) -> bytes:
        """Return the bytes of a text as the compiled encoder reads them."""
        return text.encode()

    def build_tables(self) -> EncodingTables:
        """Build the compiled encoder's tables of the vocabulary, if it `has_tables`."""
        raise NotImplementedError

    def can_cut(self, text: str, at: int) -> bool:
        """Whether a text cut before text[at] has the same ids in two parts, whatever surrounds the text."""
        return False

    def piece(self, token: bytes) -> bytes:
        """Return the bytes of text that a normal token stands for."""
        return token.replace(SPACE.encode(), b" ")


def merge_parts(symbols: list[bytes], cost: Callable[[bytes, bytes], float | None]) -> list[bytes]:
    """Join adjacent parts, the least cost(left, right) first (leftmost on a tie), until no pair has a cost."""
    symbols, num_parts = symbols.copy(), len(symbols)
    previous, following = list(range(-1, num_parts - 1)), list(range(1, num_parts + 1))
    heap = [
        (price, i, i + 1, len(a) + len(b))
        for i, (a, b) in enumerate(pairwise(symbols))
        if (price := cost(a, b)) is not None
    ]
    heapify(heap)
    while heap:
        _, left, right, merged_length = heappop(heap)
        a, b = symbols[left], symbols[right]
        if not a or not b or len(a) + len(b) != merged_length:
            continue  # stale: a part of the pair has been joined since
        symbols[left], symbols[right] = a + b, b""
        following[left] = following[right]
        if following[left] < num_parts:
            previous[following[left]] = left
        for i, j in ((previous[left], left), (left, following[left])):
            if i >= 0 and j < num_parts and (price := cost(symbols[i], symbols[j])) is not None:
                heappush(heap, (price, i, j, len(symbols[i]) + len(symbols[j])))
    return [part for part in symbols if part]
