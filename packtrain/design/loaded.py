"""What kernels take of a process, known before they are loaded: measured by a child once, kept in the user's cache.

So a run is planned while its process is still small, and the processes that search stand beside little.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from packtrain import kernels
from packtrain.child import ask
from packtrain.files import write_text
from packtrain.kernels import store
from packtrain.kernels.runtime import cache_root, refusal
from packtrain.memory import private_nbytes, settle
from packtrain.optim import Optimizer

GUESSED_NBYTES = 56 << 20  # where there is no room for the child; 46 to 53 were measured
UNSURE_NBYTES = 16 << 20  # by which the guess may be too high
CHILD_NBYTES = 96 << 20  # 86 to 92 were measured


class Loaded(NamedTuple):
    """Bytes that kernels take, by how much that may be too high, and their modules."""

    nbytes: int
    unsure: int = 0
    names: tuple[str, ...] = ()

    @property
    def to_come(self) -> int:
        """Bytes by which this process will grow."""
        return 0 if self.names and all(map(kernels.is_loaded, self.names)) else self.nbytes

    def load(self) -> None:
        kernels.load_all(self.names)

    def load_rest(self) -> None:
        """Load them if some are loaded, for what the others take is not known."""
        if any(map(kernels.is_loaded, self.names)):
            self.load()


def needed(experts: bool, packed: bool, optimizer: type[Optimizer]) -> tuple[str, ...]:
    """The kernel modules that a run calls: of a model with experts, and with matrices that are packed when written."""
    return (
        *kernels.LEARNING,
        *optimizer.kernels,
        *(kernels.EXPERTS if experts else ()),
        *(kernels.PACKING if packed else ()),
    )


def loaded(names: tuple[str, ...], room: float) -> Loaded:
    """Bytes by which a process grows that loads these kernel modules, which are compiled.

    room  bytes that a child may take; where there are none, the run is refused, and its minimum shall be right
    """
    path = _kept(names)
    try:
        return Loaded(int(json.loads(path.read_text())), 0, names)
    except (OSError, ValueError, TypeError):  # not yet, or not whole
        if 0 <= room < CHILD_NBYTES:
            return Loaded(GUESSED_NBYTES, UNSURE_NBYTES, names)
        found = ask(lambda: None, _load_in_child, kernels.threads(), names)
        if refusal(path.parent) is None:
            write_text(path, json.dumps(found))
        return Loaded(found, 0, names)


def _kept(names: Sequence[str]) -> Path:
    parts = str(kernels.threads()), *map(store.folder_name, names)
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return cache_root() / f"loaded-{name}.json"


def _load_in_child(threads: int, names: Sequence[str]) -> int:
    kernels.set_threads(threads)
    settle()
    before = private_nbytes()
    kernels.load_all(names)
    settle()
    return private_nbytes() - before
