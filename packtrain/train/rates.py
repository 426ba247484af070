"""What this machine does in a second: measured once, kept in the user's cache, so that two runs choose the same."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from packtrain import cost, kernels
from packtrain.child import ask
from packtrain.files import write_text
from packtrain.kernels.runtime import cache_root, platform_parts, writable
from packtrain.version import __version__


def rates(again: bool, say: Callable[[str], None]) -> cost.Rates:
    """The kept rates of this processor with so many threads; measured first if there are none, or if `again`."""
    threads = kernels.threads()
    path = kept(threads)
    try:
        if not again:
            return cost.Rates(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):  # none yet, or not whole
        pass
    found = ask(lambda: None, _measured, threads)
    say(
        f"measured this machine: {found.flops / 1e9:.0f} GFLOP/s, {found.nbytes / 1e9:.1f} GB/s, kept in {path}"
    )
    write_text(path, json.dumps(asdict(found)))
    return found


def kept(threads: int) -> Path:
    """Where the rates are."""
    parts = __version__, str(threads), *platform_parts()
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return writable(cache_root()) / f"rates-{name}.json"


def _measured(threads: int) -> cost.Rates:
    kernels.set_threads(threads)
    return cost.measured()
