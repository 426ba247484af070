"""The loss curve of a run as SVG, from metrics records as they come.

Steps are collected in at most BINS bins of equal width, so that a run of any length needs the same few kilobytes. A
picture shows the range and the running mean of the training loss, the validation losses, and where a loss was not
finite. It has its own background, for light pages and dark ones."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from packtrain.common.text import plural

BINS = 500  # even, because they are joined in pairs; each gives two points of the outline
WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 60, 724, 68, 368  # the plot within the picture
BLUE, PALE, ORANGE, RED = "#1d4ed8", "#bfd0f7", "#ea580c", "#dc2626"
INK, GRID = "#475569", "#e5e9f0"

Point = tuple[float, float]


class LossCurve:
    """The losses of a run so far: `add` takes each record, `svg` draws them."""

    def __init__(self) -> None:
        self.bin_steps = 1  # steps in a bin: bin k has the steps from k * bin_steps + 1 on
        self.bin_counts, self.bad_counts = np.zeros(BINS, np.int64), np.zeros(BINS, np.int64)
        self.bin_sums = np.zeros(BINS)
        self.bin_minima, self.bin_maxima = np.full(BINS, math.inf), np.full(BINS, -math.inf)
        self.valid_points: list[Point] = []

    def add(self, record: Mapping[str, Any]) -> None:
        """Add `loss` and `val_loss` of a step, if the record has them."""
        if math.isfinite(record.get("val_loss", math.nan)):
            self.valid_points.append((record["step"], record["val_loss"]))
        if "loss" not in record:
            return
        while record["step"] > BINS * self.bin_steps:
            self._widen()
        k, loss = (record["step"] - 1) // self.bin_steps, record["loss"]
        if not math.isfinite(loss):
            self.bad_counts[k] += 1
            return
        self.bin_counts[k] += 1
        self.bin_sums[k] += loss
        self.bin_minima[k] = min(self.bin_minima[k], loss)
        self.bin_maxima[k] = max(self.bin_maxima[k], loss)

    def _widen(self) -> None:
        """Join neighbouring bins, which makes room for twice as many steps."""
        self.bin_steps *= 2
        for array in (self.bin_counts, self.bad_counts, self.bin_sums):
            array[: BINS // 2], array[BINS // 2 :] = array[::2] + array[1::2], 0
        self.bin_minima[: BINS // 2] = np.minimum(self.bin_minima[::2], self.bin_minima[1::2])
        self.bin_maxima[: BINS // 2] = np.maximum(self.bin_maxima[::2], self.bin_maxima[1::2])
        self.bin_minima[BINS // 2 :], self.bin_maxima[BINS // 2 :] = math.inf, -math.inf

    def svg(self) -> str:
        """Draw the losses as SVG, or a note if there is no finite loss yet."""
        filled_bins = np.flatnonzero(self.bin_counts)
        steps = filled_bins * self.bin_steps + (self.bin_counts[filled_bins] + 1) / 2
        minima, maxima = self.bin_minima[filled_bins], self.bin_maxima[filled_bins]
        means = self.bin_sums[filled_bins] / self.bin_counts[filled_bins]
        losses = [*minima, *maxima, *(loss for _, loss in self.valid_points)]
        if not losses:
            return _svg_document([_svg_text(WIDTH / 2, HEIGHT / 2, "no finite loss yet", "middle")])
        bad_steps = (np.flatnonzero(self.bad_counts) * self.bin_steps + 1).tolist()
        last_step = max([*steps, *bad_steps, *(step for step, _ in self.valid_points), 1])
        lowest, highest = min(losses), max(losses)
        # a margin, so that the range is never empty
        margin = (highest - lowest) / 20 or abs(highest) / 20 or 1.0
        axes = LossAxes(last_step, lowest - margin, highest + margin)
        half_window = len(filled_bins) // 50
        outline = [*zip(steps, maxima, strict=True), *zip(steps[::-1], minima[::-1], strict=True)]
        mean_points = list(zip(steps, running_mean(means, half_window), strict=True))
        elements = [
            *_axis_elements(axes),
            _polyline(axes, outline, f'fill="{PALE}" stroke="{PALE}"'),
            _polyline(axes, mean_points, f'fill="none" stroke="{BLUE}" stroke-width="2"'),
            # a path of one point is invisible
            *(_circles(axes, mean_points, BLUE) if len(mean_points) == 1 else ()),
            _polyline(axes, self.valid_points, f'fill="none" stroke="{ORANGE}" stroke-width="1.5"'),
            *_circles(axes, self.valid_points, ORANGE),
            *(
                f'<path d="M{axes.x(step):.1f} {BOTTOM}v-8" stroke="{RED}" stroke-width="2"/>'
                for step in bad_steps
            ),
            self._legend_elements((2 * half_window + 1) * self.bin_steps, bool(bad_steps)),
        ]
        return _svg_document(elements)

    def _legend_elements(self, num_averaged: int, has_bad: bool) -> str:
        range_text = "" if self.bin_steps == 1 else f", range of {self.bin_steps:,} steps"
        entries = [(PALE if num_averaged > 1 else BLUE, f"training loss{range_text}")]
        if num_averaged > 1:
            entries.append((BLUE, f"mean of {plural(num_averaged, 'step')}"))
        if self.valid_points:
            entries.append((ORANGE, f"validation loss, last {self.valid_points[-1][1]:.4f}"))
        if has_bad:
            entries.append((RED, "not finite"))
        spans = (f'<tspan dx="14" fill="{color}">■</tspan> {text}' for color, text in entries)
        return _svg_text(LEFT - 14, 32, "".join(spans), "start")


@dataclass(frozen=True, slots=True)
class LossAxes:
    """Maps steps 0 to `last` and losses `min_loss` to `max_loss` to coordinates of the picture."""

    last: float
    min_loss: float
    max_loss: float

    def x(self, step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / self.last

    def y(self, loss: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (loss - self.min_loss) / (self.max_loss - self.min_loss)


def running_mean(values: np.ndarray, half_window: int) -> np.ndarray:
    """Return each value's mean with `half_window` neighbours per side, fewer towards the ends but symmetric."""
    prefix_sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    reach = np.minimum(half_window, np.minimum(at, at[::-1]))
    return np.asarray((prefix_sums[at + reach + 1] - prefix_sums[at - reach]) / (2 * reach + 1))


def round_ticks(
    low: float, high: float, max_steps: int, min_step: float
) -> tuple[list[float], int]:
    """Return (ticks, decimals of their labels) of an axis from low to high. Ticks are multiples of 1, 2 or 5 times a
    power of ten; there are at most `max_steps` distances between them, of at least `min_step`."""
    power = 10.0 ** math.floor(math.log10((high - low) / max_steps))
    step = next(m * power for m in (1, 2, 5, 10) if (high - low) / (m * power) <= max_steps)
    step = max(step, min_step)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)], decimals


def _svg_document(elements: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="system-ui, Helvetica, Arial, sans-serif" font-size="12" stroke-linejoin="round" role="img">'
    )
    card = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" fill="#fff" stroke="#cbd5e1"/>'
    return "\n".join([head, "<title>loss of a training run</title>", card, *elements, "</svg>", ""])


def _axis_elements(axes: LossAxes) -> list[str]:
    elements = []
    ticks, decimals = round_ticks(axes.min_loss, axes.max_loss, 7, 0.0)
    for loss in ticks:
        y = axes.y(loss)
        elements.append(f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="{GRID}"/>')
        elements.append(_svg_text(LEFT - 8, y + 4, f"{loss:.{decimals}f}", "end"))
    steps, _ = round_ticks(0, axes.last, 8, 1.0)
    for step in steps:
        x = axes.x(step)
        elements.append(f'<path d="M{x:.1f} {BOTTOM}v5" stroke="{INK}"/>')
        elements.append(_svg_text(x, BOTTOM + 19, f"{step:,.0f}", "middle"))
    elements.append(f'<path d="M{LEFT} {BOTTOM}H{RIGHT}" stroke="{INK}"/>')
    elements.append(_svg_text((LEFT + RIGHT) / 2, BOTTOM + 40, "step", "middle"))
    elements.append(_svg_text(LEFT - 8, TOP - 14, "loss", "end"))
    return elements


def _polyline(axes: LossAxes, points: Sequence[Point], style: str) -> str:
    coordinates = " ".join(f"{axes.x(step):.1f},{axes.y(loss):.1f}" for step, loss in points)
    return f'<polyline points="{coordinates}" {style}/>'


def _circles(axes: LossAxes, points: Sequence[Point], color: str) -> list[str]:
    return [
        f'<circle cx="{axes.x(step):.1f}" cy="{axes.y(loss):.1f}" r="3.5" fill="{color}" stroke="#fff"/>'
        for step, loss in points
    ]


def _svg_text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{INK}" text-anchor="{anchor}">{text}</text>'
