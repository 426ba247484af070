"""What became of a variant."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

EQUAL, SAID, REFUSED, DIFFERENT = "equal", "difference said", "refused by name", "different"
INVALID = "refused by the reference package"


@dataclass(frozen=True, slots=True)
class Outcome:
    """verdict is one of the above; detail says what was changed, and what the refusal or the difference is."""

    verdict: str
    detail: str = ""


Compare = Callable[[random.Random, Path], Outcome]


def refused_outcome(error: Exception, *names: str) -> Outcome:
    """A refusal, which must have one of these names in it, if there are any."""
    text = " ".join(str(error).split())
    named = not names or any(name.lower() in text.lower() for name in names)
    return Outcome(REFUSED, text) if named else Outcome(DIFFERENT, f"{text} names none of {names}")
