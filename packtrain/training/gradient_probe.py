"""A check before step 1 of fine-tuning: does every trained tensor get a gradient?

Runs one step with a learning rate at which any gradient changes its tensor; B of the LoRA adapters is set to small
random numbers for it. Then all values are restored from the file and the seed."""

import zlib
from collections.abc import Callable
from functools import partial

import numpy as np

from packtrain.common.text import plural
from packtrain.models.lora import B
from packtrain.training.training_engine import TrainingEngine
from packtrain.training.training_job import TrainingJob

PROBE_RATE = 1e3
B_DEVIATION = np.float32(0.01)
NAMED = 8  # most tensors named in a message; others are counted


class NoGradient(ArithmeticError):
    """Training would have no effect: a gradient is zero, or not finite."""


def check_gradients(
    job: TrainingJob, engine: TrainingEngine, report: Callable[[str], None]
) -> None:
    """Run one step, and raise NoGradient for trained tensors that it leaves unchanged; report experts that no token
    reaches. Afterwards all weights have their initial values again."""
    session, optimizer = engine.session, engine.optimizer
    names = engine.plans.trained_names
    for name in (name for name in names if name.endswith(B)):
        draw = np.random.default_rng(zlib.crc32(name.encode()))
        session.fill(name, partial(_init_small, draw=draw))
    initial_digests = {name: _part_digests(session.view(name)) for name in names}
    engine.optimizer = optimizer.without_decay()
    result = engine.step(job.batches(1), 1, PROBE_RATE)
    if result.skip_reason:
        raise NoGradient(f"before step 1 a gradient is not finite: {result.skip_reason}")
    unmoved = dict[str, list[int]]()
    for name in names:
        digest_pairs = zip(_part_digests(session.view(name)), initial_digests[name], strict=True)
        unchanged = [i for i, (digest, initial) in enumerate(digest_pairs) if digest == initial]
        unmoved |= {name: unchanged} if unchanged else {}
    _report_unreached(unmoved, initial_digests, report)
    for name in engine.plans.resident_leaves.keys() - set(names):
        session.fill(name, lambda array: array.fill(0))
    job.model.init_weights(session)
    engine.optimizer, engine.before = optimizer, None


def _init_small(array: np.ndarray, draw: np.random.Generator) -> None:
    draw.standard_normal(dtype=np.float32, out=array)
    array *= B_DEVIATION


def _part_digests(array: np.ndarray) -> list[int]:
    """Return checksums of an array: one, or one for each expert's part of a 3-D array."""
    return [zlib.crc32(part.data) for part in (array if array.ndim == 3 else array[None])]


def _report_unreached(
    unmoved: dict[str, list[int]], part_digests: dict[str, list[int]], report: Callable[[str], None]
) -> None:
    """Raise NoGradient for tensors of which a step changed no part; report the others' unchanged parts (experts).
    `unmoved`: indices of unchanged parts by tensor; `part_digests`: each tensor's checksums, one for each part."""
    dead = [
        name for name, unchanged in unmoved.items() if len(unchanged) == len(part_digests[name])
    ]
    if dead:
        suffix = f" and {plural(len(dead) - NAMED, 'other')}" if len(dead) > NAMED else ""
        fact = f"no gradient reaches {', '.join(dead[:NAMED])}{suffix}"
        raise NoGradient(f"{fact}; training would not change them")
    for name, unchanged in unmoved.items():
        experts = ", ".join(map(str, unchanged))
        report(f"{name}: no token of the first step reaches experts {experts}")
