"""Sampling the next token from logits: llama.cpp's samplers, each in a room of its own, as pure functions on arrays.

`Chain` puts them in order and has the state of one sequence. It knows no models.
"""

from packtrain.inference.sampling.candidate_cuts import CANDIDATES, LOGITS, MOST, TOKEN, Cut
from packtrain.inference.sampling.candidates import Candidates
from packtrain.inference.sampling.draw import draws
from packtrain.inference.sampling.dry import find_breakers
from packtrain.inference.sampling.sampler_chain import Chain, Constraint, Given
from packtrain.inference.sampling.sampling_settings import ORDER, Sampling

__all__ = [
    "CANDIDATES", "LOGITS", "MOST", "ORDER", "TOKEN", "Candidates", "Chain", "Constraint", "Cut", "Given", "Sampling",
    "draws", "find_breakers",
]  # fmt: skip
