"""Logit bias: what the user adds to logits of some tokens."""

from collections.abc import Mapping

import numpy as np

from packtrain.inference.sampling.candidates import Candidates

FEW = 1000  # candidates that are looked up one by one


def logit_bias(c: Candidates, biases: Mapping[int, float]) -> Candidates:
    """Add biases[id] to the logit of id."""
    if not biases:
        return c
    if len(c.ids) < FEW:
        own = [biases.get(id, 0.0) for id in c.ids.tolist()]
        return Candidates(c.ids, c.logits + own, False)
    added = np.zeros(int(c.ids.max()) + 1)
    there = [id for id in biases if id < len(added)]
    added[there] = [biases[id] for id in there]
    return Candidates(c.ids, np.asarray(c.logits + added[c.ids]), False)
