"""Turns text files into memory-mapped token files; the heavy part runs in a child process and is cached."""

from packtrain.corpus.cache import Corpus, prepare
from packtrain.corpus.documents import Text
from packtrain.corpus.tokens import Tokens

__all__ = ["Corpus", "Text", "Tokens", "prepare"]
