"""Training on pairs of answers: the losses, their gradients, the data, runs, resuming, refusals."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain import ops
from packtrain.cli import main
from packtrain.grad import differentiate
from packtrain.models.preference import KINDS, Preference, preference
from packtrain.samples import Samples
from packtrain.samples.formats import Reader
from packtrain.corpus.documents import Source
from packtrain.errors import InputError
from packtrain.tensor import input, weight
from packtrain.training.pairs import PairBatches
from packtrain.watch import metrics
from tests.architectures import random_model
from tests.kill import WORDS_LIKE if False else words  # noqa
