"""Children of test_session: `python -m tests.alternate rounds 100` and `python -m tests.alternate threads 3`.

rounds   one session alternates training, another batch size and evaluation; it says `round N` after each round and
         waits for a line before it goes on, so that the parent can look at this process from outside
threads  the same training steps with 1, 2, … threads; one line with the digest of all results for each number
"""

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from packtrain import Executor, Session, kernels
from packtrain.engine import backends
from packtrain.engine.optim import AdamW
from packtrain.models.config import Config
from tests.models import bind_graph, eval_graph, seeded_batch, seeded_weights, step_graph

CONFIG = Config(300, 64, 64, 2, 160, 4, 2)
# with 4 x 128 tokens every kind of kernel runs in parallel
WIDE = Config(512, 128, 160, 1, 512, 4, 2)
OPTIMIZER = AdamW(lr=1e-3)
SHAPES = {"train": (2, 32), "small": (1, 24), "eval": (2, 32)}


@dataclass(frozen=True, slots=True)
class Alternating:
    """Executors of one session, or of one session each, for the plans `train`, `small` and `eval`."""

    runs: dict[str, Executor]

    @classmethod
    def bind(cls, session: Session, names: Iterable[str] = SHAPES) -> "Alternating":
        graphs = {
            name: eval_graph(CONFIG, *SHAPES[name])
            if name == "eval"
            else step_graph(CONFIG, *SHAPES[name], OPTIMIZER, keep="blocks", max_norm=1.0)
            for name in names
        }
        return cls({name: bind_graph(graph, session=session) for name, graph in graphs.items()})

    def turn(self, name: str, t: int, seed: int) -> float:
        settings = {} if name == "eval" else OPTIMIZER.inputs(t)
        return float(self.runs[name](seeded_batch(CONFIG, *SHAPES[name], seed) | settings)["loss"])


def rounds(count: int) -> None:
    session = Session()
    model = Alternating.bind(session)
    session.set(seeded_weights(CONFIG))
    for n in range(count):
        for name in model.runs:
            model.turn(name, n + 1, n)
        print(f"round {n}", flush=True)
        sys.stdin.readline()


def digest(threads: int) -> str:
    """Of two training steps with and without recomputation: all outputs, and every leaf after them."""
    kernels.set_threads(threads)
    assert kernels.threads() == threads
    seen = hashlib.sha256()
    for keep in (None, "blocks"):
        session = Session()
        graph = step_graph(WIDE, 4, 128, OPTIMIZER, keep=keep, max_norm=1.0, chunk=256)
        run = bind_graph(graph, seeded_weights(WIDE), session, backends.cpu)
        for t in (1, 2):
            out = run(seeded_batch(WIDE, 4, 128, t) | OPTIMIZER.inputs(t))
            seen.update(b"".join(np.asarray(value).tobytes() for value in out.values()))
        leaves = [leaf.label for leaf in graph.leaves if leaf.kind in ("weight", "state")]
        seen.update(b"".join(session.get(name).tobytes() for name in leaves))
    return seen.hexdigest()


if __name__ == "__main__":
    mode, count_limit = sys.argv[1], int(sys.argv[2])
    if mode == "rounds":
        rounds(count_limit)
    else:
        for count in range(1, count_limit + 1):
            print(digest(count), flush=True)
