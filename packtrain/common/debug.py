"""Debugging by PACKTRAIN_DEBUG=graph,place,plan,time,nan,poison,compare,noreuse,norecord,calls (any subset).

graph, place, plan  print that stage        time     seconds by op, after each run
nan                 stop at the first value that is not finite, naming op, tensor, line and input ranges
poison              fill bytes with NaN before they are written and after they are freed
compare             run every op against its numpy kernel        noreuse  plan without reusing any byte
norecord            run each call by itself, instead of sequences of calls as CUDA graphs
calls               check the types of arrays passed to kernels; read from the environment only
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

from packtrain.common.errors import InputError

FLAGS = (
    "graph", "place", "plan", "time", "nan", "poison", "compare", "noreuse", "norecord", "calls",
)  # fmt: skip
_flags_override: ContextVar[frozenset[str] | None] = ContextVar("debug", default=None)


def flags() -> frozenset[str]:
    """Return the current debug flags: those of the innermost `with debug(...)`, else of PACKTRAIN_DEBUG."""
    override = _flags_override.get()
    return _parse(os.environ.get("PACKTRAIN_DEBUG", "")) if override is None else override


@contextmanager
def debug(text: str) -> Iterator[None]:
    """`with debug("nan,poison"):` turns debugging flags (see FLAGS) on for the block, in this thread. Executors follow
    the flags when they are created and when they run: `nan` stops at a value that is not finite, `poison` fills unused
    bytes with NaN."""
    token = _flags_override.set(_parse(text))
    try:
        yield
    finally:
        _flags_override.reset(token)


@cache
def _parse(text: str) -> frozenset[str]:
    """Return the debug flags in a comma-separated text. Raises InputError for an unknown flag."""
    flag_names = frozenset(filter(None, (flag.strip() for flag in text.split(","))))
    unknown_flags = sorted(flag_names - set(FLAGS))
    if unknown_flags:
        fact = f"PACKTRAIN_DEBUG: {', '.join(unknown_flags)} unknown"
        raise InputError(f"{fact}; choose from {', '.join(FLAGS)}")
    return flag_names
