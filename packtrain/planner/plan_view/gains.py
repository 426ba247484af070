"""Sizes of files against the share of a gain that each keeps, as SVG: one colour for each way to write them."""

import math
from collections.abc import Sequence

from packtrain.engine.memory_plan import size_text
from packtrain.planner.plan_view.memory_chart import (
    GRID,
    HALO,
    INK,
    LEFT,
    RIGHT,
    STRONG,
    TOP,
    byte_ticks,
    label,
    picture,
    step_ticks,
)

HEIGHT, BOTTOM = 460, 404
HUES = "#1d4ed8", "#ea580c", "#0f766e", "#7c3aed"

Point = tuple[str, str, int, float]  # way, name, bytes, share kept


def gains(points: Sequence[Point], keep: float) -> str:
    """The picture; `keep` is the share that is asked for."""
    min_share = min(keep, *(share for *_, share in points))
    low, high = math.floor(100 * min_share) - 1, max(100, *(math.ceil(100 * p[3]) for p in points))
    top = max(nbytes for _, _, nbytes, _ in points) * 1.1

    def place(nbytes: float, percent: float) -> tuple[float, float]:
        across, up = nbytes / top, (percent - low) / (high - low)
        return LEFT + (RIGHT - LEFT) * across, BOTTOM - (BOTTOM - TOP) * up

    drawn = [
        label(
            24, 34, "Size and what is kept of the gain", "start", f'font-size="16" fill="{STRONG}"'
        )
    ]
    for percent in step_ticks(high - low, 8):
        _, y = place(0, low + percent)
        drawn.append(f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="{GRID}"/>')
        drawn.append(label(LEFT - 8, y + 4, f"{low + percent} %", "end"))
    for nbytes in byte_ticks(int(top), 8):
        x, _ = place(nbytes, 0)
        drawn.append(f'<path d="M{x:.1f} {BOTTOM}v5" stroke="{INK}"/>')
        drawn.append(label(x, BOTTOM + 19, size_text(nbytes).replace(".0", ""), "middle"))
    _, y = place(0, 100 * keep)
    drawn.append(f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="{STRONG}" stroke-dasharray="6 3"/>')
    for number, method in enumerate(dict.fromkeys(method for method, *_ in points)):
        hue, method_points = HUES[number % len(HUES)], [p for p in points if p[0] == method]
        drawn.append(label(24 + 120 * number, 58, f"● {method}", "start", f'fill="{hue}"'))
        for _, name, nbytes, share in method_points:
            x, y = place(nbytes, 100 * share)
            drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{hue}" stroke="#fff"/>')
            drawn.append(label(x + 7, y - 6, name, "start", HALO))
    return picture("Size and what is kept of the gain", drawn, HEIGHT)
