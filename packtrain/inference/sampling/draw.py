"""The draw of one candidate. Token i of a text has its own random generator, so that results depend on the seed and
on i, not on how the text was split."""

import numpy as np

from packtrain.inference.sampling.candidates import Candidates


def token_rng(seed: int, index: int) -> np.random.Generator:
    """Create the random generator of token `index`: counter-based, independent of other tokens' draws."""
    return np.random.Generator(np.random.Philox(key=seed, counter=index))


def draw_token(c: Candidates, rng: np.random.Generator) -> int:
    """Draw an id by its probability: the first whose running sum of exp(logit − max) exceeds u · the total."""
    total = np.cumsum(np.exp(c.logits - c.logits.max()))
    drawn_index = int(np.searchsorted(total, rng.random() * total[-1], side="right"))
    return int(c.ids[min(drawn_index, len(c.ids) - 1)])
