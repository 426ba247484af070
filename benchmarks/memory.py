"""Text for runs whose memory is watched."""

import random


def text(count: int) -> str:
    """Enough different words for a vocabulary of 32,000."""
    rng = random.Random(0)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(60_000)]
    return " ".join(words[min(int(rng.paretovariate(0.6)), len(words) - 1)] for _ in range(count))
