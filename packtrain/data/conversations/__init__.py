"""Turns data, with a model's vocabulary and chat template, into memory-mapped tokenized samples with a loss mask."""

from packtrain.data.conversations.build_samples import TRUNCATE, Recipe
from packtrain.data.conversations.samples_cache import Dataset, prepare
from packtrain.data.conversations.samples_store import Samples

__all__ = ["TRUNCATE", "Dataset", "Recipe", "Samples", "prepare"]
