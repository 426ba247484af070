"""A plan bound to memory: its steps with their arrays. `run` creates it, `observe` reads it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packtrain.backends import Backend
from packtrain.place import Placed, Step
from packtrain.planning import Buffer, Plan


@dataclass(frozen=True, slots=True)
class Bound:
    """A step with its arrays, and the call that runs it."""

    step: Step
    results: tuple[Any, ...]
    inputs: tuple[Any, ...]
    work: tuple[Any, ...]
    run: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Watcher:
    """`see(name, value)` is called when a step computes a tensor whose name matches the shell pattern."""

    pattern: str
    see: Callable[[str, np.ndarray], None]


@dataclass(slots=True)
class Program:
    """All steps of a plan in order; `at` is the one that runs, or ran last. Backends and arenas are by space."""

    placed: Placed
    plan: Plan
    where: Mapping[str, Buffer]
    watchers: list[Watcher]
    backends: Mapping[str, Backend]
    arenas: Mapping[str, Any] = field(default_factory=dict)
    steps: list[Bound] = field(default_factory=list)
    at: int = 0
