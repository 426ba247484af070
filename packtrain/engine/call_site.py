"""Source lines of calls: where the user wrote them; gradients and recomputed calls name the forward call's line."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

Phase = Literal["forward", "backward", "recomputed"]
SourceLine = tuple[str, int]  # file and line

INTERNAL_MODULES = (
    "packtrain.engine.ops", "packtrain.engine.tensor", "packtrain.engine.autodiff", "packtrain.engine.call_site",
    "contextlib",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CallAuthor:
    """The source line and phase (forward, backward, recomputed) that new calls get, instead of the caller's line."""

    origin: SourceLine
    phase: Phase


current_author: ContextVar[CallAuthor | None] = ContextVar("writing", default=None)
_internal_files: dict[str, bool] = {}


@contextmanager
def written_for(origin: SourceLine, phase: Phase) -> Iterator[None]:
    """Give calls made inside the `with` block this source line and phase: gradients name the forward call's line."""
    reset_token = current_author.set(CallAuthor(origin, phase))
    try:
        yield
    finally:
        current_author.reset(reset_token)


def caller_line() -> SourceLine:
    """Return file and line of the user's code that is calling: the nearest caller outside INTERNAL_MODULES."""
    frame = sys._getframe(1)
    while True:
        file = frame.f_code.co_filename
        is_internal = _internal_files.get(file)
        if is_internal is None:
            module_name = str(frame.f_globals.get("__name__"))
            is_internal = _internal_files[file] = module_name.startswith(INTERNAL_MODULES)
        if not is_internal or frame.f_back is None:
            return file, frame.f_lineno
        frame = frame.f_back
