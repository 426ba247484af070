"""Epochs of MNIST: packtrain beside PyTorch eager, f32, the same nets, values and batches.

    python -m benchmarks.mnist FOLDER [--net fc] [--physical 500] [--rounds 9]

FOLDER has the files of MNIST, see examples/mnist.py, whose nets these are: 57,000 images, batches of 1,000 in parts of
--physical. Both run in processes of their own, which take turns epoch by epoch; medians of the seconds, their ratio,
and the peak of private memory (USS), sampled from outside.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import packtrain as pt
from benchmarks.train import WARM, Peer
from examples.mnist import BATCH, CHANNELS, CLASSES, HIDDEN, NETS, SIDE, digits

RATE, LEARNT = 1e-3, 57_000
FOLDER = "MNIST_FOLDER"  # environment variable that tells the processes


def data() -> pt.Dataset:
    return digits(Path(os.environ[FOLDER]), "train")


def ours(net: str, physical: int) -> Callable[[], float]:
    optimizer = pt.AdamW(lr=RATE, beta2=0.999, weight_decay=0.0)
    images = data()
    trainer = pt.Trainer(NETS[net], optimizer, batch=BATCH, physical=physical)
    places = np.arange(LEARNT)
    epochs = iter(range(1, 1 << 30))

    def epoch() -> float:
        order = images.shuffled(places, 0, next(epochs))
        return pt.epoch(trainer, images, order=order)[0].loss

    return epoch


def theirs(net: str, physical: int) -> Callable[[], float]:
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
        order, losses, right = torch.randperm(LEARNT), list[float](), 0
        for at in range(0, LEARNT, BATCH):
            update.zero_grad()
            for k in range(parts):
                here = order[at + k * physical : at + (k + 1) * physical]
                logits = model(images[here])
                loss = nn.functional.cross_entropy(logits, labels[here])
                (loss / parts).backward()
                losses.append(loss.item())
                right += int((logits.argmax(-1) == labels[here]).sum())
            update.step()
        return statistics.fmean(losses)

    return epoch


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
    peers = {
        "packtrain": Peer(ours, args.net, args.physical),
        "PyTorch eager": Peer(theirs, args.net, args.physical),
    }
    for _ in range(WARM + args.rounds):
        for peer in peers.values():
            peer.step()
            time.sleep(0.1)
    print(f"an f32 epoch of {args.net}, {LEARNT:,} images, {BATCH} = {args.physical} at a time")
    for name, peer in peers.items():
        median, losses = statistics.median(peer.seconds[WARM:]), peer.losses
        print(
            f"{name:14} {median:.3f} s (least {min(peer.seconds[WARM:]):.3f}), peak {peer.peak >> 20} MiB,"
            f" loss of the first epoch {losses[0]:.4f}, of the last {losses[-1]:.4f}"
        )
    ratios = [b / a for a, b in zip(*(peer.seconds[WARM:] for peer in peers.values()), strict=True)]
    print(f"packtrain is {statistics.median(ratios):.2f} x as fast (median of paired ratios)")


if __name__ == "__main__":
    main()
