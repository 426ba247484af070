"""A plan as SVG text of at most 200 kB, with its own background, for light pages and dark ones.

Above: the arena's addresses over time; below: the bytes alive, on the same time axis.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Unpack

from packtrain.engine.memory_plan import Buffer, Plan, size_text
from packtrain.planner.plan_view.scene import (
    CATEGORIES,
    COLORS,
    DASHES,
    READING,
    About,
    Level,
    Scene,
    fullest,
    make_scene,
    plain,
)

WIDTH, HEIGHT = 900, 692
LEFT, RIGHT = 84, 876  # both plots within the picture
TOP, BOTTOM = 128, 448  # addresses
ABOVE, BELOW = 480, 560  # bytes alive
MOST = 3_000  # the largest rectangles are drawn; the others would be specks
COLUMNS = 396  # of the bytes alive
NAMED = 4  # owners of the peak
INK, GRID, STRONG = "#475569", "#e5e9f0", "#0f172a"
PLAIN = f'fill="{INK}"'
HALO = (
    f'fill="{STRONG}" stroke="#fff" stroke-width="3" paint-order="stroke"'  # readable over anything
)


def chart(plan: Plan, *, rectangles: int = MOST, **about: Unpack[About]) -> str:
    """The SVG text, with so many of the largest rectangles. See About for the others."""
    scene = make_scene(plan, **about)
    frame = Frame(scene.last, scene.top)
    drawn = [
        label(24, 34, scene.title, "start", f'font-size="16" font-weight="600" fill="{STRONG}"'),
        label(24, 54, scene.summary, "start"),
        label(24, 74, READING, "start"),
        _legend(scene),
        _lines(scene),
        *_axes(frame),
        *_rectangles(scene, frame, rectangles),
        *_alive(scene, frame),
        *_peak(scene, frame),
        *(_level(level, frame) for level in scene.levels),
        *_owners(scene),
    ]
    return picture(scene.title, drawn)


@dataclass(frozen=True, slots=True)
class Frame:
    """Maps steps 0 to `last` and bytes 0 to `top` to coordinates."""

    last: int
    top: int

    def x(self, step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / self.last

    def y(self, nbytes: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * nbytes / self.top

    def area(self, b: Buffer) -> float:
        return (self.x(b.end) - self.x(b.start)) * (self.y(0) - self.y(b.nbytes))


def _rectangles(scene: Scene, frame: Frame, count: int) -> Iterator[str]:
    """One path for each category."""
    shown = sorted(scene.buffers, key=frame.area, reverse=True)[:count]
    for category in scene.used():
        path = "".join(_rectangle(b, frame) for b in shown if b.category == category)
        yield f'<path d="{path}" {_fill(category)}/>'


def _rectangle(b: Buffer, frame: Frame) -> str:
    """The path of a buffer; large ones have a gap around them."""
    x, end = frame.x(b.start), frame.x(b.end)
    y, base = frame.y(b.offset + b.nbytes), frame.y(b.offset)
    end -= 0.5 if end - x > 4 else 0
    base -= 0.5 if base - y > 3 else 0
    return f"M{x:.1f} {y:.1f}H{end:.1f}V{base:.1f}H{x:.1f}z"


def _alive(scene: Scene, frame: Frame) -> Iterator[str]:
    """The stacked categories; each column shows its fullest step."""
    columns = min(COLUMNS, scene.last)
    stack = scene.live[:, fullest(scene.live, columns)].cumsum(axis=0)
    width = (RIGHT - LEFT) / columns
    for category in reversed(scene.used()):  # lower ones are drawn over higher ones
        tops = stack[CATEGORIES.index(category)].tolist()
        path = "".join(f"V{_height(top, frame):.1f}h{width:.2f}" for top in tops)
        yield f'<path d="M{LEFT} {BELOW}{path}V{BELOW}z" {_fill(category)}/>'
    if scene.samples:
        points = [(frame.x(step), _height(nbytes, frame)) for step, nbytes in scene.samples]
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline points="{places}" fill="none" stroke="{STRONG}" stroke-width="1.5"/>'


def _height(nbytes: float, frame: Frame) -> float:
    """The y coordinate of a number of live bytes."""
    return BELOW - (BELOW - ABOVE) * nbytes / frame.top


def _axes(frame: Frame) -> Iterator[str]:
    for nbytes in byte_ticks(frame.top, 8):
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
    yield label(LEFT - 8, ABOVE + 4, "alive", "end")


def byte_ticks(top: int, max_steps: int) -> list[int]:
    """Multiples of a power of two from 0 to top, at most `max_steps` steps."""
    step = 1
    while top // step > max_steps:
        step *= 2
    return list(range(0, top + 1, step))


def step_ticks(last: int, max_steps: int) -> list[int]:
    """Multiples of 1, 2 or 5 times a power of ten from 0 to last, at most `max_steps` steps."""
    step = next(
        m * 10**power
        for power in range(20)
        for m in (1, 2, 5)
        if last // (m * 10**power) <= max_steps
    )
    return list(range(0, last + 1, step))


def _peak(scene: Scene, frame: Frame) -> Iterator[str]:
    at = scene.arena.peak_step
    x = frame.x(at + 0.5)
    anchor = "start" if at < scene.last / 4 else "end" if at > scene.last * 3 / 4 else "middle"
    text = f"peak at op {at:,}: {size_text(scene.arena.lower_bound)} alive"
    path = f"M{x:.1f} {TOP}V{BOTTOM + 4}M{x:.1f} {ABOVE - 5}V{BELOW}"  # the text is between them
    yield f'<path d="{path}" stroke="{STRONG}" stroke-dasharray="1 3"/>'
    yield label(x, ABOVE - 10, text, anchor, f'fill="{STRONG}"')


def _level(level: Level, frame: Frame) -> str:
    return _line(LEFT, RIGHT, frame.y(level.nbytes), level.kind)


def _line(left: float, right: float, y: float, kind: str) -> str:
    dashes = f'stroke="{STRONG}" stroke-dasharray="{DASHES[kind]}"'
    return f'<path d="M{left} {y:.1f}H{right}" {dashes}/>'


def _legend(scene: Scene) -> str:
    """One row of the legend; squares are filled like the rectangles."""
    drawn, x = [], 24
    for category in scene.used():
        drawn.append(f'<rect x="{x}" y="87" width="11" height="11" {_fill(category)}/>')
        drawn.append(label(x + 17, 97, category, "start"))
        x += 34 + 7 * len(category)
    return "".join(drawn)


def _lines(scene: Scene) -> str:
    """The row of the legend below it: the lines and their sizes."""
    drawn, x = [], 24
    for kind, text in scene.lines:
        drawn += [_line(x, x + 28, 111, kind), label(x + 35, 115, text, "start")]
        x += 56 + 7 * len(text)
    return "".join(drawn)


def _owners(scene: Scene) -> Iterator[str]:
    yield label(24, 608, "Largest at the peak", "start", f'font-weight="600" fill="{STRONG}"')
    for k, b in enumerate(scene.owners[:NAMED]):
        y = 626 + 16 * k
        about = f"{plain(b.name, 60)} = {plain(b.op, 30)}, {b.category}"
        yield label(110, y, size_text(b.nbytes), "end")
        yield label(160, y, f"{scene.share(b.nbytes):.1%}", "end")
        yield label(172, y, about, "start")


def _fill(category: str) -> str:
    return f'fill="{"url(#hatch)" if category == "recomputed" else COLORS[category]}"'


def picture(title: str, drawn: Sequence[str], height: int = HEIGHT) -> str:
    head = (
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
    return "\n".join([head, name, hatch, card, *drawn, "</svg>", ""])


def label(x: float, y: float, text: str, anchor: str, style: str = PLAIN) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}>{escape(text)}</text>'
