"""The loss curve of a run as SVG, from metrics records as they come.

Steps are kept in at most BINS bins of equal width, so that a run of any length needs the same few kilobytes. A
picture shows the range and the running mean of the training loss, the validation losses, and where a loss was not
finite. It has its own background, for light pages and dark ones.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from packtrain.common.text import plural

BINS = 500  # even, because they are joined in pairs; each gives two points of the outline
WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 60, 724, 68, 368  # the plot within the picture
BLUE, PALE, ORANGE, RED, INK, GRID = (
    "#1d4ed8",
    "#bfd0f7",
    "#ea580c",
    "#dc2626",
    "#475569",
    "#e5e9f0",
)

Point = tuple[float, float]


class Curve:
    """The losses so far: `add` each record, `svg` draws."""

    def __init__(self) -> None:
        self.width = 1  # steps in a bin: bin k has the steps from k * width + 1 on
        self.count, self.bad = np.zeros(BINS, np.int64), np.zeros(BINS, np.int64)
        self.total = np.zeros(BINS)
        self.low, self.high = np.full(BINS, math.inf), np.full(BINS, -math.inf)
        self.valid: list[Point] = []

    def add(self, record: Mapping[str, Any]) -> None:
        """Add `loss` and `val_loss` of a step, if the record has them."""
        if math.isfinite(record.get("val_loss", math.nan)):
            self.valid.append((record["step"], record["val_loss"]))
        if "loss" not in record:
            return
        while record["step"] > BINS * self.width:
            self._widen()
        k, loss = (record["step"] - 1) // self.width, record["loss"]
        if not math.isfinite(loss):
            self.bad[k] += 1
            return
        self.count[k] += 1
        self.total[k] += loss
        self.low[k] = min(self.low[k], loss)
        self.high[k] = max(self.high[k], loss)

    def _widen(self) -> None:
        """Join neighbouring bins, which makes room for twice as many steps."""
        self.width *= 2
        for array in (self.count, self.bad, self.total):
            array[: BINS // 2], array[BINS // 2 :] = array[::2] + array[1::2], 0
        self.low[: BINS // 2] = np.minimum(self.low[::2], self.low[1::2])
        self.high[: BINS // 2] = np.maximum(self.high[::2], self.high[1::2])
        self.low[BINS // 2 :], self.high[BINS // 2 :] = math.inf, -math.inf

    def svg(self) -> str:
        """The picture, or a note if there is no finite loss yet."""
        filled = np.flatnonzero(self.count)
        steps = filled * self.width + (self.count[filled] + 1) / 2
        low, high = self.low[filled], self.high[filled]
        means = self.total[filled] / self.count[filled]
        losses = [*low, *high, *(loss for _, loss in self.valid)]
        if not losses:
            return _picture([_text(WIDTH / 2, HEIGHT / 2, "no finite loss yet", "middle")])
        bad = (np.flatnonzero(self.bad) * self.width + 1).tolist()
        last = max([*steps, *bad, *(step for step, _ in self.valid), 1])
        frame = Frame(last, *_padded(min(losses), max(losses)))
        half = len(filled) // 50
        outline = [*zip(steps, high, strict=True), *zip(steps[::-1], low[::-1], strict=True)]
        mean = list(zip(steps, running_mean(means, half), strict=True))
        drawn = [
            *_axes(frame),
            _path(frame, outline, f'fill="{PALE}" stroke="{PALE}"'),
            _path(frame, mean, f'fill="none" stroke="{BLUE}" stroke-width="2"'),
            *(
                _dots(frame, mean, BLUE) if len(mean) == 1 else ()
            ),  # a path of one point is invisible
            _path(frame, self.valid, f'fill="none" stroke="{ORANGE}" stroke-width="1.5"'),
            *_dots(frame, self.valid, ORANGE),
            *(_mark(frame.x(step)) for step in bad),
            self._legend((2 * half + 1) * self.width, bool(bad)),
        ]
        return _picture(drawn)

    def _legend(self, averaged: int, bad: bool) -> str:
        each = "" if self.width == 1 else f", range of {self.width:,} steps"
        entries = [(PALE if averaged > 1 else BLUE, f"training loss{each}")]
        if averaged > 1:
            entries.append((BLUE, f"mean of {plural(averaged, 'step')}"))
        if self.valid:
            entries.append((ORANGE, f"validation loss, last {self.valid[-1][1]:.4f}"))
        if bad:
            entries.append((RED, "not finite"))
        spans = (f'<tspan dx="14" fill="{color}">■</tspan> {text}' for color, text in entries)
        return _text(LEFT - 14, 32, "".join(spans), "start")


@dataclass(frozen=True, slots=True)
class Frame:
    """Steps 0 to `last` and losses `low` to `high`, as places in the picture."""

    last: float
    low: float
    high: float

    def x(self, step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / self.last

    def y(self, loss: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (loss - self.low) / (self.high - self.low)


def running_mean(values: np.ndarray, half: int) -> np.ndarray:
    """Each value's mean with `half` neighbours on both sides, fewer towards the ends but symmetric."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    reach = np.minimum(half, np.minimum(at, at[::-1]))
    return np.asarray((sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1))


def round_ticks(
    low: float, high: float, max_steps: int, min_step: float
) -> tuple[list[float], int]:
    """Multiples of 1, 2 or 5 times a power of ten from low to high, at most `max_steps` steps of `min_step` or more.

    Also the decimals that their labels need.
    """
    power = 10.0 ** math.floor(math.log10((high - low) / max_steps))
    step = next(m * power for m in (1, 2, 5, 10) if (high - low) / (m * power) <= max_steps)
    step = max(step, min_step)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)], decimals


def _padded(low: float, high: float) -> tuple[float, float]:
    """The range with a margin; never empty."""
    air = (high - low) / 20 or abs(high) / 20 or 1.0
    return low - air, high + air


def _picture(drawn: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="system-ui, Helvetica, Arial, sans-serif" font-size="12" stroke-linejoin="round" role="img">'
    )
    card = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" fill="#fff" stroke="#cbd5e1"/>'
    return "\n".join([head, "<title>loss of a training run</title>", card, *drawn, "</svg>", ""])


def _axes(frame: Frame) -> list[str]:
    drawn = []
    ticks, decimals = round_ticks(frame.low, frame.high, 7, 0.0)
    for loss in ticks:
        y = frame.y(loss)
        drawn.append(f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="{GRID}"/>')
        drawn.append(_text(LEFT - 8, y + 4, f"{loss:.{decimals}f}", "end"))
    steps, _ = round_ticks(0, frame.last, 8, 1.0)
    for step in steps:
        x = frame.x(step)
        drawn.append(f'<path d="M{x:.1f} {BOTTOM}v5" stroke="{INK}"/>')
        drawn.append(_text(x, BOTTOM + 19, f"{step:,.0f}", "middle"))
    drawn.append(f'<path d="M{LEFT} {BOTTOM}H{RIGHT}" stroke="{INK}"/>')
    drawn.append(_text((LEFT + RIGHT) / 2, BOTTOM + 40, "step", "middle"))
    drawn.append(_text(LEFT - 8, TOP - 14, "loss", "end"))
    return drawn


def _path(frame: Frame, points: Sequence[Point], style: str) -> str:
    places = " ".join(f"{frame.x(step):.1f},{frame.y(loss):.1f}" for step, loss in points)
    return f'<polyline points="{places}" {style}/>'


def _dots(frame: Frame, points: Sequence[Point], color: str) -> list[str]:
    return [
        f'<circle cx="{frame.x(step):.1f}" cy="{frame.y(loss):.1f}" r="3.5" fill="{color}" stroke="#fff"/>'
        for step, loss in points
    ]


def _mark(x: float) -> str:
    return f'<path d="M{x:.1f} {BOTTOM}v-8" stroke="{RED}" stroke-width="2"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{INK}" text-anchor="{anchor}">{text}</text>'
