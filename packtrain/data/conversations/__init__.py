"""Turns conversations, with a model's vocabulary and chat template, into memory-mapped token ids with a loss mask."""

from packtrain.data.conversations.build_samples import TRUNCATE_CHOICES, DatasetRecipe
from packtrain.data.conversations.samples_cache import SampleDataset, prepare_dataset
from packtrain.data.text.token_files import TokenizedSamples
