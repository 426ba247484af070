"""Training of any model: datasets, epochs, fit; saved as GGUF by leaf names.

A model is a loss of a physical batch of datapoints. Nothing here knows language models.
"""

from packtrain.fitting.dataset import Dataset
from packtrain.fitting.epochs import Batch, Callbacks, epoch, evaluate
from packtrain.fitting.fitted import Epoch, Fitted, fit
from packtrain.fitting.model import Model
from packtrain.fitting.result import Result
from packtrain.fitting.saved import load, save
from packtrain.fitting.trainer import Trainer

__all__ = [
    "Batch", "Callbacks", "Dataset", "Epoch", "Fitted", "Model", "Result", "Trainer", "epoch", "evaluate", "fit",
    "load", "save",
]  # fmt: skip
