"""Learn to read digits, with a fully connected net or a convolutional one: python examples/mnist.py [FOLDER]

    python examples/mnist.py [FOLDER] [--net fc|conv] [--epochs 5] [--physical 500] [--memory 200MiB] [-o digits.gguf]

FOLDER has the four files of MNIST, such as train-images-idx3-ubyte.gz; without it, printed digits are drawn with noise.
The nets are those of ggml's MNIST example. The result is saved as GGUF, loaded again and tested.
"""

import argparse
import gzip
import struct
import tempfile
import time
from pathlib import Path

import numpy as np

import packtrain as pt

BATCH, SIDE, CLASSES, HIDDEN, CHANNELS = 1000, 28, 10, 500, 8


def idx(path: Path) -> np.ndarray:
    """The array of an IDX file: a magic number with the count of axes, their lengths, bytes."""
    data = gzip.decompress(path.read_bytes())
    axes = data[3]
    shape = struct.unpack_from(f">{axes}I", data, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape)


def digits(folder: Path, part: str) -> pt.Dataset:
    """Images (N, 784) f32 from 0 to 1 and labels (N,) i32."""
    images = idx(folder / f"{part}-images-idx3-ubyte.gz")
    labels = idx(folder / f"{part}-labels-idx1-ubyte.gz")
    pixels = images.reshape(len(images), -1).astype(np.float32) / 255
    return pt.Dataset({"images": pixels, "labels": labels.astype(np.int32)})


GLYPHS = (  # 3 x 5 dots of each digit, row by row
    "111101101101111", "010110010010111", "111001111100111", "111001111001111", "101101111001001",
    "111100111001111", "111100111101111", "111001010010010", "111101111101111", "111101111001111",
)  # fmt: skip


def drawn(count: int, seed: int) -> pt.Dataset:
    """As many printed digits, each at a random place, with noise."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    images = rng.random((count, SIDE, SIDE), np.float32) * 0.5
    for image, label in zip(images, labels, strict=True):
        dots = np.array([*GLYPHS[label]], int).reshape(5, 3)
        y, x = rng.integers(2, 6), rng.integers(6, 10)
        image[y : y + 20, x : x + 12] += np.kron(dots, np.ones((4, 4), np.float32))
    pixels = images.reshape(count, -1) / np.float32(1.5)
    return pt.Dataset({"images": pixels, "labels": labels.astype(np.int32)})


def linear(name: str, x: pt.Tensor, outputs: int) -> pt.Tensor:
    w = pt.weight(f"{name}.weight", (outputs, x.shape[1]))
    return pt.add(pt.matmul(x, w), pt.weight(f"{name}.bias", (outputs,)))


def fully_connected(rows: int) -> pt.Model:
    """784 pixels, 500 hidden values, 10 classes."""
    images, labels = pt.input("images", (rows, SIDE**2)), pt.input("labels", (rows,), pt.i32)
    hidden = pt.relu(linear("fc1", images, HIDDEN))
    return pt.Model.cross_entropy(linear("fc2", hidden, CLASSES), labels)


def convolutional(rows: int) -> pt.Model:
    """Two times: 3 x 3 filters, relu, the largest of 2 x 2; then 10 classes."""
    images, labels = pt.input("images", (rows, SIDE**2)), pt.input("labels", (rows,), pt.i32)
    x = pt.reshape(images, shape=(rows, 1, SIDE, SIDE))
    for number, channels in enumerate((CHANNELS, 2 * CHANNELS), 1):
        w = pt.weight(f"conv{number}.kernel", (channels, x.shape[1], 3, 3))
        b = pt.weight(f"conv{number}.bias", (channels, 1, 1))
        x = pt.pool_2d(
            pt.relu(pt.add(pt.conv_2d(x, w, padding=(1, 1)), b)), largest=True, window=(2, 2)
        )
    flat = pt.reshape(x, shape=(rows, x.spec.size // rows))
    return pt.Model.cross_entropy(linear("dense", flat, CLASSES), labels)


NETS = {"fc": fully_connected, "conv": convolutional}
RATES = {"fc": 2e-3, "conv": 1e-2}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--net", choices=NETS, default="fc")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--physical", type=int, help="images at a time; default: as memory allows")
    parser.add_argument("--memory")
    unsaved = Path(tempfile.gettempdir()) / "digits.gguf"
    parser.add_argument("-o", "--output", type=Path, default=unsaved)
    args = parser.parse_args()
    if args.folder is None:
        train_set, test_set = drawn(10_000, seed=0), drawn(1_000, seed=1)
    else:
        train_set, test_set = digits(args.folder, "train"), digits(args.folder, "t10k")
    start_time = time.perf_counter()
    done = pt.fit(
        NETS[args.net],
        train_set,
        pt.AdamW(lr=RATES[args.net], beta2=0.999, weight_decay=0.1),
        schedule="cosine",
        epochs=args.epochs,
        batch=BATCH,
        physical=args.physical,
        val_split=0.05,
        memory=args.memory,
        on_message=print,
    )
    elapsed, planned = time.perf_counter() - start_time, done.trainer.planned_nbytes
    print(f"{elapsed:.1f} s; memory: peak {done.peak_nbytes >> 20} of {planned >> 20} MiB planned")
    pt.save(args.output, done.weights)
    model = pt.Trainer(NETS[args.net], physical=500, values=pt.load(args.output))
    _, result = pt.epoch(model, test_set, 0)
    print(f"test: {result}")


if __name__ == "__main__":
    main()
