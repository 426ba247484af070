"""Data and a model's vocabulary and chat template in, tokenized samples with the tokens to learn out, mapped."""

from packtrain.samples.build import TRUNCATE, Recipe
from packtrain.samples.cache import Dataset, prepare
from packtrain.samples.store import Samples

__all__ = ["TRUNCATE", "Dataset", "Recipe", "Samples", "prepare"]
