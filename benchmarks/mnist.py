"""Epochs of MNIST: packtrain beside PyTorch eager, f32, the same nets, values and batches.

    python -m benchmarks.mnist FOLDER [--net fc] [--physical 500] [--rounds 9]

FOLDER has the files of MNIST, see examples/mnist.py, whose nets these are: 57,000 images, batches of 1,000 in parts of
--physical. Both run in processes of their own, which take turns epoch by epoch; medians of the seconds, their ratio,
and the peak of private memory, sampled every 20 ms in the last of the epochs that do not count.
"""

import argparse
import os
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import packtrain as pt
from benchmarks.peer_process import PeerProcess
from examples.mnist import BATCH, CHANNELS, CLASSES, HIDDEN, NETS, SIDE, digits
from packtrain.devtools.bench.timing import TimedStep, paired, timed_steps

RATE, NUM_TRAIN = 1e-3, 57_000
WARM = 2  # epochs that do not count
FOLDER = "MNIST_FOLDER"  # environment variable that tells the processes


def data() -> pt.Dataset:
    return digits(Path(os.environ[FOLDER]), "train")


def ours(net: str, physical: int) -> Callable[[], TimedStep]:
    optimizer = pt.AdamW(lr=RATE, beta2=0.999, weight_decay=0.0)
    images = data()
    trainer = pt.Trainer(NETS[net], optimizer, batch=BATCH, physical=physical)
    places = np.arange(NUM_TRAIN)
    epochs = iter(range(1, 1 << 30))

    def epoch() -> float:
        order = images.shuffled(places, 0, next(epochs))
        return pt.epoch(trainer, images, order=order)[0].loss

    return timed_steps(epoch)


def theirs(net: str, physical: int) -> Callable[[], TimedStep]:
    import torch
    from torch import nn

    pool = SIDE // 4
    models = {
        "fc": lambda: nn.Sequential(
            nn.Linear(SIDE**2, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
        ),
        "conv": lambda: nn.Sequential(
            nn.Unflatten(1, (1, SIDE, SIDE)),
            *(nn.Conv2d(1, CHANNELS, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
            nn.Linear(2 * CHANNELS * pool * pool, CLASSES),
        ),
    }
    torch.manual_seed(0)
    model = models[net]()
    update = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    columns = data().columns
    images = torch.from_numpy(columns["images"])
    labels = torch.from_numpy(columns["labels"]).long()
    parts = BATCH // physical

    def epoch() -> float:
        order, losses, num_correct = torch.randperm(NUM_TRAIN), list[float](), 0
        for at in range(0, NUM_TRAIN, BATCH):
            update.zero_grad()
            for k in range(parts):
                batch_ids = order[at + k * physical : at + (k + 1) * physical]
                logits = model(images[batch_ids])
                loss = nn.functional.cross_entropy(logits, labels[batch_ids])
                (loss / parts).backward()
                losses.append(loss.item())
                num_correct += int((logits.argmax(-1) == labels[batch_ids]).sum())
            update.step()
        return statistics.fmean(losses)

    return timed_steps(epoch)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--net", default="fc", choices=NETS)
    parser.add_argument("--physical", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    os.environ[FOLDER] = str(args.folder)
    names = {"packtrain": "ours", "PyTorch eager": "theirs"}
    with ExitStack() as stack:
        net_args = args.net, args.physical
        peers = {
            name: stack.enter_context(PeerProcess("benchmarks.mnist", function, *net_args))
            for name, function in names.items()
        }
        turns = [
            {name: peer(turn == WARM - 1) for name, peer in peers.items()}
            for turn in range(WARM + args.rounds)
        ]
    print(f"an f32 epoch of {args.net}, {NUM_TRAIN:,} images, {BATCH} = {args.physical} at a time")
    seconds = {name: [turn[name].seconds for turn in turns[WARM:]] for name in names}
    for name, times in seconds.items():
        peak = turns[WARM - 1][name].nbytes
        print(
            f"{name:14} {statistics.median(times):.3f} s (least {min(times):.3f}), peak {peak >> 20} MiB,"
            f" loss of the first epoch {turns[0][name].loss:.4f}, of the last {turns[-1][name].loss:.4f}"
        )
    ratio = paired(*seconds.values())
    print(f"packtrain is {ratio:.2f} x as fast (median of paired ratios)")


if __name__ == "__main__":
    main()
