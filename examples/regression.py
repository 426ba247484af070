"""Find a line through noisy points by four optimizers, and draw it: python examples/regression.py

The data, the optimizers' settings and the goal are those of ggml's own regression test, with two optimizers more.
"""

import numpy as np

import packtrain as pt

SLOPE, LEVEL, POINTS = 1.2, 3.4, 201
START = {"a": np.array([1.0]), "b": np.array([3.0])}


def line(rows: int) -> pt.Model:
    """y = a x + b, by mean squared error."""
    x, y = pt.input("x", (rows, 1)), pt.input("y", (rows, 1))
    guess = pt.add(pt.mul(x, pt.weight("a", (1,))), pt.weight("b", (1,)))
    return pt.Model.mean_squared_error(guess, y)


def picture(x: np.ndarray, y: np.ndarray, a: float, b: float) -> str:
    """The points (.) and the line (#) as text."""
    rows, columns = 15, 61
    grid = [[" "] * columns for _ in range(rows)]
    low, high = y.min(), y.max()
    for values, mark in ((y, "."), (a * x + b, "#")):
        for at, value in zip(x, values, strict=True):
            row = round((high - value) / (high - low) * (rows - 1))
            column = round((at - x[0]) / (x[-1] - x[0]) * (columns - 1))
            if 0 <= row < rows:
                grid[row][column] = mark
    return "\n".join("".join(row).rstrip() for row in grid)


def main() -> None:
    x = np.linspace(-100, 100, POINTS)
    y = SLOPE * x + LEVEL + np.random.default_rng(2).normal(0, 0.1, POINTS)
    data = {"x": x[:, None].astype(np.float32), "y": y[:, None].astype(np.float32)}
    falling = [1e-4 * 0.99 ** (1000 * step / 900) for step in range(901)]
    for optimizer, epochs, schedule in (
        (pt.AdamW(lr=0.1, beta2=0.999, weight_decay=0.0), 1000, None),
        (pt.SGD(lr=1e-4), 900, falling.__getitem__),
        (pt.SGD(lr=1e-5, momentum=0.99), 900, None),
        (pt.LBFGS(), 10, None),
    ):
        done = pt.fit(
            line, data, optimizer, epochs=epochs, batch=POINTS, values=START, schedule=schedule
        )
        a, b = (float(done.weights[name][0]) for name in ("a", "b"))
        loss = done.epochs[-1].trained.loss
        print(f"{optimizer.name:6} {epochs:5} epochs: y = {a:.4f} x + {b:.4f}, loss {loss:.5f}")
    print(picture(x, y, a, b))


if __name__ == "__main__":
    main()
