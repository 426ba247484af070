"""Before step 1 of a tuning run: does a gradient reach every tensor that is trained?

One step is taken at a rate with which any gradient changes a tensor, B of low-rank additions being small random
numbers for it; then all values are made again as they were, from the file and the seed.
"""

import zlib
from collections.abc import Callable
from functools import partial

import numpy as np

from packtrain.models.lora import B
from packtrain.training.engine import Engine
from packtrain.training.finite import FiniteGuard
from packtrain.training.job import Job
from packtrain.words import plural

RATE = 1e3
DEVIATION = np.float32(0.01)
NAMED = 8  # so many tensors are named, others are counted


class NoGradient(ArithmeticError):
    """A run would end as it began: a gradient is not finite, or zero."""


def probe(job: Job, engine: Engine, say: Callable[[str], None]) -> None:
    """Raise NoGradient for tensors that nothing would train; experts that no token has reached are named."""
    session, optimizer = engine.session, engine.optimizer
    names = engine.plans.trained
    for name in (name for name in names if name.endswith(B)):
        draw = np.random.default_rng(zlib.crc32(name.encode()))
        session.fill(name, partial(_small, draw=draw))
    before = {name: _digests(session.view(name)) for name in names}
    engine.optimizer = optimizer.bare()
    did = engine.step(job.batches(1), 1, RATE)
    if did.bad:
        raise NoGradient(f"before step 1 a gradient is not finite: {did.bad}")
    still = {
        name: [
            i for i, digest in enumerate(_digests(session.view(name))) if digest == before[name][i]
        ]
        for name in names
    }
    _judge({name: same for name, same in still.items() if same}, before, say)
    for name in engine.plans.kept.keys() - set(names):
        session.fill(name, lambda array: array.fill(0))
    job.subject.begin(session)
    engine.optimizer, engine.guard = optimizer, FiniteGuard()


def _small(array: np.ndarray, draw: np.random.Generator) -> None:
    draw.standard_normal(dtype=np.float32, out=array)
    array *= DEVIATION


def _digests(array: np.ndarray) -> list[int]:
    """Of the whole, or of each expert's part."""
    return [zlib.crc32(part.data) for part in (array if array.ndim == 3 else array[None])]


def _judge(
    still: dict[str, list[int]], all_parts: dict[str, list[int]], say: Callable[[str], None]
) -> None:
    dead = [name for name, same in still.items() if len(same) == len(all_parts[name])]
    if dead:
        more = f" and {plural(len(dead) - NAMED, 'other')}" if len(dead) > NAMED else ""
        raise NoGradient(
            f"no gradient reaches {', '.join(dead[:NAMED])}{more}; training would not change them"
        )
    for name, same in still.items():
        say(f"{name}: no token of the first step reaches experts {', '.join(map(str, same))}")
