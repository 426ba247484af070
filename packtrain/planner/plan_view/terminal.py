"""A plan as text for the terminal: the arena over time in half blocks, live bytes, and the largest buffers.

Each column shows the fullest step of its time interval, so that the peak is always shown.
"""

import textwrap
from typing import Unpack

import numpy as np

from packtrain.common.text import plural
from packtrain.engine.memory_plan import Plan, size_text
from packtrain.planner.plan_view.scene import (
    CATEGORIES,
    COLORS,
    OWNERS,
    About,
    Scene,
    fullest,
    make_scene,
    plain,
)

MARGIN = 11  # columns for the labels of the axis
LINES = 14  # of the picture; each shows two rows
SHADES = dict(zip(CATEGORIES, "▪█▓▒░▚", strict=True))  # without colour
BARS = " ▁▂▃▄▅▆▇█"
FREE = -1


def terminal(plan: Plan, width: int = 80, *, color: bool = False, **about: Unpack[About]) -> str:
    """Lines of at most `width` columns, at least 40. See About for the others."""
    width = max(width, 40)
    scene = make_scene(plan, **about)
    steps = fullest(scene.live, width - MARGIN)
    heights = _raster(scene, steps)
    marks = _marks(scene)
    lines = [plain(scene.title, width), *_facts(scene, width)]
    for k in range(LINES):
        above, below = heights[2 * LINES - 1 - 2 * k], heights[2 * LINES - 2 - 2 * k]
        cells = zip(above.tolist(), below.tolist(), strict=True)
        lines.append(f"{marks[k]:>{MARGIN - 2}} ┤" + "".join(_cell(a, b, color) for a, b in cells))
    lines.append(f"{'alive':>{MARGIN - 2}}  " + _bars(scene, steps))
    lines.append(" " * MARGIN + _axis(scene, steps))
    return "\n".join([*lines, *_legend(scene, width, color), "", *_owners(scene, width), ""])


def _facts(scene: Scene, width: int) -> list[str]:
    """The summary, wrapped only between facts."""
    summary = scene.summary.replace(" ", "\u00a0").replace("·\u00a0", "· ")
    return [line.replace("\u00a0", " ") for line in textwrap.wrap(summary, width)]


def _raster(scene: Scene, steps: np.ndarray) -> np.ndarray:
    """Category of the byte in the middle of each row, from the bottom, at each step."""
    grid = np.full((2 * LINES, len(steps)), FREE)
    unit = scene.top / len(grid)
    for b in scene.buffers:
        low, high = (round(edge / unit) for edge in (b.offset, b.offset + b.nbytes))
        first, last = np.searchsorted(steps, (b.start, b.end))
        grid[low:high, first:last] = CATEGORIES.index(b.category)
    return grid


def _marks(scene: Scene) -> list[str]:
    """Labels of the lines: sizes at the bottom and at the levels."""
    marks = [""] * LINES
    marks[-1] = "0 B"
    for level in scene.levels:
        at = LINES - 1 - min(int(level.nbytes / scene.top * LINES), LINES - 1)
        marks[at] = size_text(level.nbytes)
    return marks


def _cell(above: int, below: int, color: bool) -> str:
    """One character for two rows. Without colour, a mixed cell has the shade of its lower half."""
    if above == below == FREE:
        return " "
    if FREE in (above, below):
        sign, kind = ("▄", below) if above == FREE else ("▀", above)
        return f"\x1b[38;5;{_code(kind)}m{sign}\x1b[0m" if color else sign
    if not color:
        return SHADES[CATEGORIES[below]]
    return f"\x1b[38;5;{_code(above)};48;5;{_code(below)}m▀\x1b[0m"


def _legend(scene: Scene, width: int, color: bool) -> list[str]:
    kinds = [CATEGORIES.index(category) for category in scene.used()]
    entries = [f"{_cell(kind, kind, color)} {CATEGORIES[kind]}" for kind in kinds]
    per_line = len(CATEGORIES) if width >= 72 else 3  # entries to a line
    return ["  ".join(entries[k : k + per_line]) for k in range(0, len(entries), per_line)]


def _code(kind: int) -> int:
    """The nearest colour of the terminal's 6 × 6 × 6 cube."""
    hexes = COLORS[CATEGORIES[kind]].removeprefix("#")
    red, green, blue = (round(int(hexes[k : k + 2], 16) / 51) for k in (0, 2, 4))
    return 16 + 36 * red + 6 * green + blue


def _bars(scene: Scene, steps: np.ndarray) -> str:
    live = scene.live.sum(axis=0)
    eighths = -(-live[steps] * 8 // max(int(live.max(initial=0)), 1))
    return "".join(BARS[n] for n in eighths.tolist())


def _axis(scene: Scene, steps: np.ndarray) -> str:
    """The peak under its column, and the last step if there is room."""
    at, width = scene.arena.peak_step, len(steps)
    peak, end = f"↑ peak, op {at:,}", f"{scene.last - 1:,}"
    column = int(np.searchsorted(steps, at))
    if column + len(peak) > width:
        peak = f"peak, op {at:,} ↑"
        column = max(column - len(peak) + 1, 0)
    line = " " * column + peak
    return line + end.rjust(width - len(line)) if len(line) + len(end) < width else line


def _owners(scene: Scene, width: int) -> list[str]:
    arena = scene.arena
    head = f"at the peak, op {arena.peak_step:,}, {size_text(arena.lower_bound)} are alive:"
    lines = textwrap.wrap(head, width)
    shown, remaining = scene.owners[:OWNERS], scene.owners[OWNERS:]
    room = min(max((len(b.name) for b in shown), default=0), max(width - 48, 8))
    for b in shown:
        row = f"{size_text(b.nbytes):>10} {scene.share(b.nbytes):>6.1%}  {b.category:<10}  "
        lines.append((row + f"{plain(b.name, room):<{room}}  {plain(b.op)}")[:width].rstrip())
    if remaining:
        nbytes = sum(b.nbytes for b in remaining)
        lines.append(
            f"{size_text(nbytes):>10} {scene.share(nbytes):>6.1%}  {plural(len(remaining), 'other')}"
        )
    return lines
