"""Sampling the next token from logits: llama.cpp's samplers, each in a room of its own, as pure functions on arrays.

`Chain` puts them in order and has the state of one sequence. It knows no models.
"""

from packtrain.sampling.candidates import Candidates
from packtrain.sampling.chain import Chain, Constraint, Given
from packtrain.sampling.cut import CANDIDATES, LOGITS, MOST, TOKEN, Cut
from packtrain.sampling.draw import draws
from packtrain.sampling.dry import find_breakers
from packtrain.sampling.settings import ORDER, Sampling

__all__ = [
    "CANDIDATES", "LOGITS", "MOST", "ORDER", "TOKEN", "Candidates", "Chain", "Constraint", "Cut", "Given", "Sampling",
    "draws", "find_breakers",
]  # fmt: skip
