"""Temperature: sharpens or flattens what the other samplers left; dynamic, by entropy (kalomaze)."""

import math

import numpy as np

from packtrain.inference.sampling.candidates import Candidates, entropy, probabilities, ranked


def temperature(c: Candidates, temp: float) -> Candidates:
    """Divide logits by `temp`; 0 keeps only the likeliest token, of equals the lowest id."""
    if temp <= 0:
        best_id = c.ids[c.logits == c.logits.max()].min()
        return c.select(c.ids == best_id)
    with np.errstate(over="ignore"):  # −inf is correct below the largest logit, which is 0 then
        return Candidates(c.ids, (c.logits - c.logits.max()) / temp, c.sorted)


def dynamic_temperature(c: Candidates, temp: float, spread: float, exponent: float) -> Candidates:
    """Apply a temperature from temp − spread to temp + spread: the greater the entropy, the higher."""
    if spread <= 0:
        return temperature(c, temp)
    if len(c.ids) <= 1:
        return c
    c = ranked(c)
    entropy_share = max(entropy(probabilities(c.logits)) / math.log(len(c.ids)), 0.0)
    min_temp = max(temp - spread, 0.0)
    return temperature(c, min_temp + (temp + spread - min_temp) * entropy_share**exponent)
