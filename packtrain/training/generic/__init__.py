"""Training of any model: datasets, epochs, fit; saved as GGUF by leaf names.

A model is a loss of a physical batch of datapoints. This package knows no language models."""

from packtrain.training.generic.dataset import Dataset
from packtrain.training.generic.epochs import Batch, Callbacks, epoch, evaluate
from packtrain.training.generic.fit_loop import Epoch, Fitted, fit
from packtrain.training.generic.fit_model import Model
from packtrain.training.generic.fit_result import Result
from packtrain.training.generic.fit_model import load, save
from packtrain.training.generic.trainer import Trainer
