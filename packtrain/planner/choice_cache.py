"""Saves what runs without a limit recompute, so that an equal run need not search again.

The key is a hash of all that a search depends on: its arguments, the files of this package, the machine."""

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from packtrain import kernels
from packtrain.common.debug import flags
from packtrain.common.files import write_text
from packtrain.kernels.runtime.environment import cache_root, platform_identity, write_error
from packtrain.planner.checkpointing import RecomputeChoice
from packtrain.planner.plan_request import NO_KERNELS, PlanRequest
from packtrain.planner.step_shape import StepShape

MAX_CHOICES = 64  # choices in the file, the latest


def with_saved_choice(
    shape: StepShape, request: PlanRequest, search: Callable[[StepShape, PlanRequest], StepShape]
) -> StepShape:
    """Return the shape with the recomputation that `search` chooses, or chose before for equal arguments."""
    path, key, choices = cache_root() / "choices.json", choice_key(shape, request), dict[str, Any]()
    with suppress(OSError, ValueError, TypeError, LookupError):  # missing or damaged
        choices |= json.loads(path.read_text())
        saved, keep = choices[key], None
        if saved is not None:
            inner = (tuple((int(place), int(rank)) for place, rank in block) for block in saved[1])
            keep = RecomputeChoice(tuple(map(int, saved[0])), tuple(inner))
        return replace(shape, keep=keep)
    chosen_shape = search(shape, request)
    keep = chosen_shape.keep
    choices[key] = None if keep is None else (keep.stream, keep.inner)
    if write_error(path.parent) is None:
        with suppress(OSError):  # a full disk
            write_text(path, json.dumps(dict([*choices.items()][-MAX_CHOICES:])))
    return chosen_shape


def choice_key(shape: StepShape, request: PlanRequest) -> str:
    """Return a hash of all that a choice of recomputation depends on: the arguments, our sources, the machine."""
    folder, machine = Path(__file__).parents[1], (kernels.threads(), *platform_identity())
    paths = [f"{at}/{name}" for at, _, names in os.walk(folder) for name in names]
    files = [(path, os.stat(path)) for path in sorted(paths) if path.endswith(".py")]
    sources = [(path, file.st_size, file.st_mtime_ns) for path, file in files]
    arguments = shape, replace(request, baseline_nbytes=0, kernels=NO_KERNELS), sorted(flags())
    return hashlib.sha256(pickle.dumps((arguments, machine, sources))).hexdigest()[:16]
