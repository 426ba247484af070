"""Sampling the next token from logits: llama.cpp's samplers, each in a room of its own, as pure functions on arrays.

`Chain` puts them in order and has the state of one sequence. It knows no models.
"""

from packtrain.sampling.candidates import Candidates
from packtrain.sampling.chain import Chain, Constraint
from packtrain.sampling.draw import draws
from packtrain.sampling.dry import find_breakers
from packtrain.sampling.settings import ORDER, Sampling

__all__ = ["ORDER", "Candidates", "Chain", "Constraint", "Sampling", "draws", "find_breakers"]
