"""Shows a plan as text for the terminal: the arena over time in half blocks, live bytes, and the largest buffers.

Each column shows the fullest step of its time interval, so that the peak is always shown."""

import textwrap
from typing import Unpack

import numpy as np

from packtrain.common.text import plural
from packtrain.engine.memory_plan import Plan, size_text
from packtrain.planner.plan_view import scene as scenes
from packtrain.planner.plan_view.scene import CATEGORIES, COLORS, PlanScene

MARGIN = 11  # columns for the labels of the axis
NUM_LINES = 14  # lines of the picture; each shows two rows
SHADES = dict(zip(CATEGORIES, "▪█▓▒░▚", strict=True))  # characters without colour
BARS = " ▁▂▃▄▅▆▇█"
FREE_CELL = -1


def terminal_text(
    plan: Plan, width: int = 80, *, color: bool = False, **about: Unpack[scenes.SceneOptions]
) -> str:
    """Draw a plan as text for a terminal, at most `width` columns wide, at least 40. `about`: see SceneOptions."""
    width = max(width, 40)
    scene = scenes.PlanScene(plan, **about)
    column_steps = scenes.fullest_steps(scene.live_nbytes, width - MARGIN)
    heights = _category_grid(scene, column_steps)
    marks = _line_labels(scene)
    # wrapped only between facts
    summary = textwrap.wrap(scene.summary.replace(" ", "\u00a0").replace("·\u00a0", "· "), width)
    lines = [scenes.printable_text(scene.heading, width)]
    lines += [line.replace("\u00a0", " ") for line in summary]
    for k in range(NUM_LINES):
        upper_row, below = heights[2 * NUM_LINES - 1 - 2 * k], heights[2 * NUM_LINES - 2 - 2 * k]
        cells = zip(upper_row.tolist(), below.tolist(), strict=True)
        lines.append(f"{marks[k]:>{MARGIN - 2}} ┤" + "".join(_glyph(a, b, color) for a, b in cells))
    live_nbytes = scene.live_nbytes.sum(axis=0)
    eighths = -(-live_nbytes[column_steps] * 8 // max(int(live_nbytes.max(initial=0)), 1))
    lines.append(f"{'alive':>{MARGIN - 2}}  " + "".join(BARS[n] for n in eighths.tolist()))
    lines.append(" " * MARGIN + _axis_line(scene, column_steps))
    return "\n".join([*lines, *_legend(scene, width, color), "", *_peak_lines(scene, width), ""])


def _category_grid(scene: PlanScene, steps: np.ndarray) -> np.ndarray:
    """Return the category's index of what the arena holds, or FREE_CELL, int (rows from the bottom, steps)."""
    grid = np.full((2 * NUM_LINES, len(steps)), FREE_CELL)
    row_nbytes = scene.max_nbytes / len(grid)
    for b in scene.buffers:
        row_start, row_stop = (round(edge / row_nbytes) for edge in (b.offset, b.offset + b.nbytes))
        column_start, column_stop = np.searchsorted(steps, (b.start, b.end))
        grid[row_start:row_stop, column_start:column_stop] = CATEGORIES.index(b.category)
    return grid


def _line_labels(scene: PlanScene) -> list[str]:
    """Return the axis label of each line of the picture: 0 at the bottom, sizes at the levels, else ""."""
    line_labels = [""] * NUM_LINES
    line_labels[-1] = "0 B"
    for level in scene.levels:
        at = NUM_LINES - 1 - min(int(level.nbytes / scene.max_nbytes * NUM_LINES), NUM_LINES - 1)
        line_labels[at] = size_text(level.nbytes)
    return line_labels


def _glyph(upper: int, lower: int, color: bool) -> str:
    """Return a half-block character for two rows of the picture, given the category's index, or FREE_CELL, of the upper
    and of the lower one. Without colour, it has the shade of the lower one."""
    if upper == lower == FREE_CELL:
        return " "
    if FREE_CELL in (upper, lower):
        sign, category_index = ("▄", lower) if upper == FREE_CELL else ("▀", upper)
        return f"\x1b[38;5;{_color_code(category_index)}m{sign}\x1b[0m" if color else sign
    if not color:
        return SHADES[CATEGORIES[lower]]
    return f"\x1b[38;5;{_color_code(upper)};48;5;{_color_code(lower)}m▀\x1b[0m"


def _legend(scene: PlanScene, width: int, color: bool) -> list[str]:
    category_indices = [CATEGORIES.index(category) for category in scene.used()]
    entries = [f"{_glyph(kind, kind, color)} {CATEGORIES[kind]}" for kind in category_indices]
    per_line = len(CATEGORIES) if width >= 72 else 3  # entries to a line
    return ["  ".join(entries[k : k + per_line]) for k in range(0, len(entries), per_line)]


def _color_code(category_index: int) -> int:
    """Return the number of a category's colour among the terminal's 6 × 6 × 6 colours."""
    hex_digits = COLORS[CATEGORIES[category_index]].removeprefix("#")
    red, green, blue = (round(int(hex_digits[k : k + 2], 16) / 51) for k in (0, 2, 4))
    return 16 + 36 * red + 6 * green + blue


def _axis_line(scene: PlanScene, steps: np.ndarray) -> str:
    """Return the line below the picture, which marks the peak under its column and the last step if there is room."""
    peak_step, width = scene.arena.peak_step, len(steps)
    peak_text, last_text = f"↑ peak, op {peak_step:,}", f"{scene.last - 1:,}"
    column = int(np.searchsorted(steps, peak_step))
    if column + len(peak_text) > width:
        peak_text = f"peak, op {peak_step:,} ↑"
        column = max(column - len(peak_text) + 1, 0)
    line = " " * column + peak_text
    return line + last_text.rjust(width - len(line)) if len(line) + len(last_text) < width else line


def _peak_lines(scene: PlanScene, width: int) -> list[str]:
    arena = scene.arena
    heading = f"at the peak, op {arena.peak_step:,}, {size_text(arena.lower_bound)} are alive:"
    lines = textwrap.wrap(heading, width)
    shown, remaining = scene.peak_buffers
    name_width = min(max((len(b.name) for b in shown), default=0), max(width - 48, 8))
    for b in shown:
        line_start = f"{size_text(b.nbytes):>10} {scene.share(b.nbytes):>6.1%}  {b.category:<10}  "
        name = f"{scenes.printable_text(b.name, name_width):<{name_width}}"
        lines.append(f"{line_start}{name}  {scenes.printable_text(b.op)}"[:width].rstrip())
    if remaining:
        nbytes = sum(b.nbytes for b in remaining)
        lines.append(
            f"{size_text(nbytes):>10} {scene.share(nbytes):>6.1%}  {plural(len(remaining), 'other')}"
        )
    return lines
