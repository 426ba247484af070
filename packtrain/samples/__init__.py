"""Turns data, with a model's vocabulary and chat template, into memory-mapped tokenized samples with a loss mask."""

from packtrain.samples.build import TRUNCATE, Recipe
from packtrain.samples.cache import Dataset, prepare
from packtrain.samples.store import Samples

__all__ = ["TRUNCATE", "Dataset", "Recipe", "Samples", "prepare"]
