"""One training step of a preset: packtrain beside PyTorch eager, f32, same shape, values and tokens.

    python -m benchmarks.train [--preset 15m] [--batch 4] [--rounds 9]

Both run in processes of their own, which take turns step by step; medians and their ratio are printed, and the
peak of private memory (USS), sampled from outside.
"""

import argparse
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import psutil

from packtrain.models import transformer
from packtrain.models.config import PRESETS, Config

WARM = 2


def batch(config: Config, rows: int) -> dict[str, np.ndarray]:
    rng, time_ = np.random.default_rng(0), config.context_length
    ids = rng.integers(0, config.vocab_size, (rows, time_ + 1)).astype(np.int32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}


def ours(preset: str, rows: int) -> Callable[[], float]:
    import packtrain as pt
    from packtrain.optim import AdamW, training

    config, optimizer = PRESETS[preset], AdamW()
    weights, shape = transformer.weights(config), (rows, config.context_length)
    made = transformer.loss(config, weights, *shape)
    graph = training({"loss": made.loss}, list(weights.values()), optimizer)
    session = pt.Session()
    run = session.executor(pt.place(graph))
    session.set(transformer.initial(config))
    pos = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    fixed = batch(config, rows) | {
        "weights": np.full(shape, 1 / (shape[0] * shape[1]), np.float32),
        "pos": pos,
        "seq": np.zeros(shape, np.int32),
    }
    steps = iter(range(1, 1 << 30))
    return lambda: float(run(fixed | optimizer.inputs(next(steps)))["loss"])


def theirs(preset: str, rows: int) -> Callable[[], float]:
    import torch

    from benchmarks.torch_llama import Llama, optimizer

    torch.manual_seed(0)
    config = PRESETS[preset]
    model = Llama(config, transformer.initial(config))
    update = optimizer(model, 1e-3)
    tokens, targets = (torch.from_numpy(x).long() for x in batch(config, rows).values())

    def step() -> float:
        update.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        update.step()
        return loss.item()

    return step


def serve(
    make: Callable[[str, int], Callable[[], float]], preset: str, rows: int, pipe: Connection
) -> None:
    step = make(preset, rows)
    pipe.send("ready")
    while pipe.recv():
        began = time.perf_counter()
        loss = step()
        pipe.send((time.perf_counter() - began, loss))


class Peer:
    """A process that makes a step when asked, watched for its private memory."""

    def __init__(self, make: Callable[..., Callable[[], float]], preset: str, rows: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, end = context.Pipe()
        self.process = context.Process(target=serve, args=(make, preset, rows, end), daemon=True)
        self.process.start()
        self.peak = 0
        self.seconds: list[float] = []
        self.losses: list[float] = []
        threading.Thread(target=self._watch, daemon=True).start()
        self.pipe.recv()

    def _watch(self) -> None:
        assert self.process.pid is not None
        seen = psutil.Process(self.process.pid)
        while self.process.is_alive():
            try:
                self.peak = max(self.peak, seen.memory_full_info().uss)
            except psutil.Error:
                return
            time.sleep(0.02)

    def step(self) -> None:
        self.pipe.send(True)
        seconds, loss = self.pipe.recv()
        self.seconds.append(seconds)
        self.losses.append(loss)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--preset", default="15m", choices=PRESETS)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    peers = {
        "packtrain": Peer(ours, args.preset, args.batch),
        "PyTorch eager": Peer(theirs, args.preset, args.batch),
    }
    for _ in range(WARM + args.rounds):
        for peer in peers.values():
            peer.step()
            time.sleep(0.1)
    tokens = args.batch * PRESETS[args.preset].context_length
    print(
        f"one f32 step of {args.preset}, {args.batch} rows, {tokens} tokens, {args.rounds} rounds"
    )
    print(
        f"{'':14} {'median s':>9} {'min s':>9} {'tokens/s':>9} {'peak USS MiB':>13}  first and last loss"
    )
    medians = []
    for name, peer in peers.items():
        timed = peer.seconds[WARM:]
        medians.append(statistics.median(timed))
        print(
            f"{name:14} {medians[-1]:9.4f} {min(timed):9.4f} {tokens / medians[-1]:9.0f} {peer.peak / 2**20:13.0f}"
            f"  {peer.losses[0]:.5f} {peer.losses[-1]:.5f}"
        )
    a, b = peers.values()
    paired = statistics.median(
        y / x for x, y in zip(a.seconds[WARM:], b.seconds[WARM:], strict=True)
    )
    print(
        f"packtrain is {paired:.2f} x as fast (median of paired ratios) at {a.peak / b.peak:.2f} of the memory"
    )


if __name__ == "__main__":
    main()
