"""Where a call was written: the user's line, or for gradients and recomputation the forward call's."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

Phase = Literal["forward", "backward", "recomputed"]
Origin = tuple[str, int]  # file and line

OWN = (
    "packtrain.engine.ops",
    "packtrain.engine.tensor",
    "packtrain.engine.autodiff",
    "packtrain.engine.call_site",
    "contextlib",
)


@dataclass(frozen=True, slots=True)
class Author:
    origin: Origin
    phase: Phase


writing: ContextVar[Author | None] = ContextVar("writing", default=None)
_inside: dict[str, bool] = {}


@contextmanager
def written_for(origin: Origin, phase: Phase) -> Iterator[None]:
    """Calls inside this block get this origin: gradients and recomputation name the forward line."""
    token = writing.set(Author(origin, phase))
    try:
        yield
    finally:
        writing.reset(token)


def caller() -> Origin:
    """The nearest line outside the ops and what builds on them."""
    frame = sys._getframe(1)
    while True:
        file = frame.f_code.co_filename
        is_internal = _inside.get(file)
        if is_internal is None:
            is_internal = _inside[file] = str(frame.f_globals.get("__name__")).startswith(OWN)
        if not is_internal or frame.f_back is None:
            return file, frame.f_lineno
        frame = frame.f_back
