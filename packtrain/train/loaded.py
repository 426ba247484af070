"""What kernels take of a process, known before they are loaded: measured by a child once, kept in the user's cache.

So a run is planned while its process is still small, and the processes that search stand beside little.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from packtrain import kernels
from packtrain.child import ask
from packtrain.files import write_text
from packtrain.kernels import store
from packtrain.kernels.runtime import cache_root, writable
from packtrain.memory import private_nbytes, settle

LIKELY_NBYTES = 64 << 20  # of the kernels, where there is no room for the child
CHILD_NBYTES = 112 << 20


def loaded_nbytes(names: Sequence[str], room: float) -> int:
    """Bytes by which a process grows that loads these kernel modules, which are compiled.

    room  bytes that a child may take
    """
    path = _kept(names)
    try:
        return int(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):  # not yet, or not whole
        if room < CHILD_NBYTES:
            return LIKELY_NBYTES
        found = ask(lambda: None, _load_in_child, kernels.threads(), tuple(names))
        write_text(path, json.dumps(found))
        return found


def _kept(names: Sequence[str]) -> Path:
    parts = str(kernels.threads()), *map(store.folder_name, names)
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return writable(cache_root()) / f"loaded-{name}.json"


def _load_in_child(threads: int, names: Sequence[str]) -> int:
    kernels.set_threads(threads)
    settle()
    before = private_nbytes()
    kernels.load_all(names)
    settle()
    return private_nbytes() - before
