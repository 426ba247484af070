"""Sampling the next token from logits: llama.cpp's samplers as pure functions on arrays.

`Chain` puts them in order and has the state of one sequence. This package knows no models."""

from packtrain.inference.sampling.candidate_cuts import (
    CANDIDATES, LOGITS, MAX_CANDIDATES, TOKEN, SamplerCut,
)  # fmt: skip
from packtrain.inference.sampling.dry import find_breakers
from packtrain.inference.sampling.sampler_chain import Chain, Constraint, SamplerInput
from packtrain.inference.sampling.samplers import Candidates, token_rng
from packtrain.inference.sampling.sampling_settings import SAMPLER_ORDER, Sampling
