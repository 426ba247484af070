"""Draws a plan as SVG text of at most 200 kB, with its own background, for light pages and dark ones.

Above: the arena's addresses over time; below: the bytes alive, on the same time axis."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Unpack

from packtrain.engine.memory_plan import Buffer, Plan, size_text
from packtrain.planner.plan_view import scene as scenes
from packtrain.planner.plan_view.scene import CATEGORIES, COLORS, PlanScene, printable_text

WIDTH, HEIGHT = 900, 692
LEFT, RIGHT = 84, 876  # edges of both plots within the picture
TOP, BOTTOM = 128, 448  # edges of the plot of addresses
LIVE_TOP, BELOW = 480, 560  # edges of the plot of live bytes
MAX_RECTANGLES = 3_000  # the largest rectangles are drawn; the others would be specks
MAX_COLUMNS = 396  # columns of the plot of live bytes
NUM_NAMED_BUFFERS = 4  # buffers named below the plots, the largest at the peak
INK, GRID, STRONG = "#475569", "#e5e9f0", "#0f172a"
PLAIN_STYLE = f'fill="{INK}"'
# readable over anything
HALO_STYLE = f'fill="{STRONG}" stroke="#fff" stroke-width="3" paint-order="stroke"'


def chart_svg(
    plan: Plan, *, rectangles: int = MAX_RECTANGLES, **about: Unpack[scenes.SceneOptions]
) -> str:
    """Return a plan as an SVG picture; only the largest `rectangles` buffers are drawn. `about`: see SceneOptions."""
    scene = scenes.PlanScene(plan, **about)
    frame = ChartFrame(scene.last, scene.max_nbytes)
    # the legend's row of lines and their sizes, below the categories
    line_legend, x = list[str](), 24
    for line_kind, line_text in scene.legend_lines:
        line_legend += [_line(x, x + 28, 111, line_kind), label(x + 35, 115, line_text, "start")]
        x += 56 + 7 * len(line_text)
    elements = [
        label(24, 34, scene.heading, "start", f'font-size="16" font-weight="600" fill="{STRONG}"'),
        label(24, 54, scene.summary, "start"), label(24, 74, scenes.READING_HINT, "start"),
        _legend(scene), "".join(line_legend), *_axis_elements(frame), *_rectangle_paths(scene, frame, rectangles),
        *_live_paths(scene, frame), *_peak_marker(scene, frame),
        *(_line(LEFT, RIGHT, frame.y(level.nbytes), level.line_kind) for level in scene.levels),
        *_peak_buffer_labels(scene),
    ]  # fmt: skip
    return svg_picture(scene.heading, elements)


@dataclass(frozen=True, slots=True)
class ChartFrame:
    """Maps steps 0 to `last` and bytes 0 to `max_nbytes` to x and y in the picture."""

    last: int
    max_nbytes: int

    def x(self, step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / self.last

    def y(self, nbytes: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * nbytes / self.max_nbytes

    def area(self, b: Buffer) -> float:
        return (self.x(b.end) - self.x(b.start)) * (self.y(0) - self.y(b.nbytes))


def _rectangle_paths(scene: PlanScene, frame: ChartFrame, max_rectangles: int) -> Iterator[str]:
    """Yield an SVG path for each category, such as gradients, with the rectangles of its buffers."""
    largest_buffers = sorted(scene.buffers, key=frame.area, reverse=True)[:max_rectangles]
    for category in scene.used():
        path = "".join(_rectangle_path(b, frame) for b in largest_buffers if b.category == category)
        yield f'<path d="{path}" {_fill_attr(category)}/>'


def _rectangle_path(b: Buffer, frame: ChartFrame) -> str:
    """Return the SVG path commands of a buffer's rectangle; large ones leave a gap to their neighbours."""
    x, x_end = frame.x(b.start), frame.x(b.end)
    y, y_base = frame.y(b.offset + b.nbytes), frame.y(b.offset)
    x_end -= 0.5 if x_end - x > 4 else 0
    y_base -= 0.5 if y_base - y > 3 else 0
    return f"M{x:.1f} {y:.1f}H{x_end:.1f}V{y_base:.1f}H{x:.1f}z"


def _live_paths(scene: PlanScene, frame: ChartFrame) -> Iterator[str]:
    """Yield SVG paths of the lower chart: bytes alive over time, stacked by category, and measured memory as a line."""
    num_columns = min(MAX_COLUMNS, scene.last)
    columns = scenes.fullest_steps(scene.live_nbytes, num_columns)
    stack = scene.live_nbytes[:, columns].cumsum(axis=0)
    column_width = (RIGHT - LEFT) / num_columns
    for category in reversed(scene.used()):  # lower ones are drawn over higher ones
        column_tops = stack[CATEGORIES.index(category)].tolist()
        path = "".join(f"V{_live_height(top, frame):.1f}h{column_width:.2f}" for top in column_tops)
        yield f'<path d="M{LEFT} {BELOW}{path}V{BELOW}z" {_fill_attr(category)}/>'
    if scene.samples:
        points = [(frame.x(step), _live_height(nbytes, frame)) for step, nbytes in scene.samples]
        point_texts = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline points="{point_texts}" fill="none" stroke="{STRONG}" stroke-width="1.5"/>'


def _live_height(nbytes: float, frame: ChartFrame) -> float:
    """Return the y in the lower chart for a number of live bytes."""
    return BELOW - (BELOW - LIVE_TOP) * nbytes / frame.max_nbytes


def _axis_elements(frame: ChartFrame) -> Iterator[str]:
    for nbytes in byte_ticks(frame.max_nbytes, 8):
        y = frame.y(nbytes)
        yield f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="{GRID}"/>'
        yield label(LEFT - 8, y + 4, size_text(nbytes).replace(".0", ""), "end")
    for step in step_ticks(frame.last, 10):
        x = frame.x(step)
        yield f'<path d="M{x:.1f} {BELOW}v5M{x:.1f} {BOTTOM}v5" stroke="{INK}"/>'
        yield label(x, BELOW + 18, f"{step:,}", "middle")
    yield f'<path d="M{LEFT} {BOTTOM}H{RIGHT}M{LEFT} {BELOW}H{RIGHT}" stroke="{INK}"/>'
    yield label(LEFT - 12, BELOW + 18, "op", "end")
    yield label(LEFT - 8, BELOW + 4, "0 B", "end")
    yield label(LEFT - 8, LIVE_TOP + 4, "alive", "end")


def byte_ticks(max_nbytes: int, max_steps: int) -> list[int]:
    """Return ticks of an axis of bytes: multiples of a power of two up to `max_nbytes`, at most `max_steps` + 1."""
    tick_step = 1
    while max_nbytes // tick_step > max_steps:
        tick_step *= 2
    return list(range(0, max_nbytes + 1, tick_step))


def step_ticks(last: int, max_steps: int) -> list[int]:
    """Return ticks of an axis up to step `last`: multiples of 1, 2 or 5 times 10^n, at most `max_steps` + 1."""
    sizes = (factor * 10**power for power in range(20) for factor in (1, 2, 5))
    tick_step = next(size for size in sizes if last // size <= max_steps)
    return list(range(0, last + 1, tick_step))


def _peak_marker(scene: PlanScene, frame: ChartFrame) -> Iterator[str]:
    at = scene.arena.peak_step
    x = frame.x(at + 0.5)
    anchor = "start" if at < scene.last / 4 else "end" if at > scene.last * 3 / 4 else "middle"
    peak_text = f"peak at op {at:,}: {size_text(scene.arena.lower_bound)} alive"
    path = f"M{x:.1f} {TOP}V{BOTTOM + 4}M{x:.1f} {LIVE_TOP - 5}V{BELOW}"  # the text is between them
    yield f'<path d="{path}" stroke="{STRONG}" stroke-dasharray="1 3"/>'
    yield label(x, LIVE_TOP - 10, peak_text, anchor, f'fill="{STRONG}"')


def _line(x_start: float, x_end: float, y: float, line_kind: str) -> str:
    """Return a horizontal dashed line of the chart as SVG, in the dashes of `line_kind`."""
    dashes = f'stroke="{STRONG}" stroke-dasharray="{scenes.DASHES[line_kind]}"'
    return f'<path d="M{x_start} {y:.1f}H{x_end}" {dashes}/>'


def _legend(scene: PlanScene) -> str:
    """Return the legend's squares with the names of the categories, as SVG elements."""
    elements, x = [], 24
    for category in scene.used():
        elements.append(f'<rect x="{x}" y="87" width="11" height="11" {_fill_attr(category)}/>')
        elements.append(label(x + 17, 97, category, "start"))
        x += 34 + 7 * len(category)
    return "".join(elements)


def _peak_buffer_labels(scene: PlanScene) -> Iterator[str]:
    yield label(24, 608, "Largest at the peak", "start", f'font-weight="600" fill="{STRONG}"')
    for k, b in enumerate(scene.peak_buffers[0][:NUM_NAMED_BUFFERS]):
        y = 626 + 16 * k
        description = f"{printable_text(b.name, 60)} = {printable_text(b.op, 30)}, {b.category}"
        yield label(110, y, size_text(b.nbytes), "end")
        yield label(160, y, f"{scene.share(b.nbytes):.1%}", "end")
        yield label(172, y, description, "start")


def _fill_attr(category: str) -> str:
    return f'fill="{"url(#hatch)" if category == "recomputed" else COLORS[category]}"'


def svg_picture(title: str, elements: Sequence[str], height: int = HEIGHT) -> str:
    svg_head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, Helvetica, Arial, sans-serif" font-size="12" role="img">'
    )
    card = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" fill="#fff" stroke="#cbd5e1"/>'
    hatch = (
        '<pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="5" height="5" fill="{COLORS["recomputed"]}"/>'
        f'<rect width="2" height="5" fill="{COLORS["activation"]}"/></pattern>'
    )
    name = f"<title>{escape(title)}</title>"
    return "\n".join([svg_head, name, hatch, card, *elements, "</svg>", ""])


def label(x: float, y: float, text: str, anchor: str, style: str = PLAIN_STYLE) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}>{escape(text)}</text>'
