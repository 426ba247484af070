"""Turns text files into memory-mapped token files; the heavy part runs in a child process and is cached."""

from packtrain.data.text.corpus_cache import Corpus, prepare_corpus
from packtrain.data.text.documents import CorpusRecipe
from packtrain.data.text.token_files import DocumentTokens
