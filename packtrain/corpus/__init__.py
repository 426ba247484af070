"""Text files in, memory-mapped token files out; the heavy part runs in a child process and is kept in a cache."""

from packtrain.corpus.cache import Corpus, prepare
from packtrain.corpus.documents import Text
from packtrain.corpus.tokens import Tokens

__all__ = ["Corpus", "Text", "Tokens", "prepare"]
