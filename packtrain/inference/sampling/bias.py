"""Logit bias: numbers that the user adds to logits of some tokens."""

from collections.abc import Mapping

import numpy as np

from packtrain.inference.sampling.candidates import Candidates

MAX_LOOKUPS = 1000  # fewer candidates are looked up one by one


def logit_bias(c: Candidates, biases: Mapping[int, float]) -> Candidates:
    """Add biases[id] to the logit of each candidate id; returns new candidates."""
    if not biases:
        return c
    if len(c.ids) < MAX_LOOKUPS:
        bias_values = [biases.get(id, 0.0) for id in c.ids.tolist()]
        return Candidates(c.ids, c.logits + bias_values, False)
    added_bias = np.zeros(int(c.ids.max()) + 1)
    biased_ids = [id for id in biases if id < len(added_bias)]
    added_bias[biased_ids] = [biases[id] for id in biased_ids]
    return Candidates(c.ids, np.asarray(c.logits + added_bias[c.ids]), False)
