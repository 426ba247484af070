"""A plan as one interactive HTML page, which loads nothing and allows only its own script.

page.html has the frame and styles, page.js draws and handles events. Tables are written here, so that they work
without the script.
"""

import base64
import hashlib
import json
from html import escape
from importlib import resources
from typing import Any, Unpack

from packtrain.common.text import plural
from packtrain.engine.memory_plan import Buffer, Plan, size_text
from packtrain.planner.plan_view.scene import (
    CATEGORIES,
    COLORS,
    DASHES,
    OWNERS,
    READING,
    About,
    Scene,
    make_scene,
    plain,
)

LATER = 6  # tensors named that reuse a rectangle's bytes; others are counted


def page(plan: Plan, **about: Unpack[About]) -> str:
    """The HTML text."""
    scene = make_scene(plan, **about)
    script = _asset("page.js")
    seal = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "title": escape(scene.title),
        "summary": escape(scene.summary),
        "reading": READING,
        "seal": seal,
        "legend": _legend(scene),
        "owners": _owners(scene),
        "bytes": _bytes(scene),
        "data": _inert(json.dumps(_data(scene), separators=(",", ":"))),
        "script": script,
    }
    text = _asset("page.html")
    # no part can contain another's placeholder: names and titles are escaped, and the script has none
    for name, part in parts.items():
        text = text.replace(f"<!--{name}-->", part)
    return text


def _asset(name: str) -> str:
    return resources.files("packtrain.planner.plan_view").joinpath(name).read_text(encoding="utf-8")


def _inert(text: str) -> str:
    """JSON that cannot close its <script> element."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _data(scene: Scene) -> dict[str, Any]:
    """The data for the script: a column for each field of a buffer."""
    buffers = scene.buffers
    ops = {op: k for k, op in enumerate(dict.fromkeys(b.op for b in buffers))}
    arena = scene.arena
    return {
        "start": [b.start for b in buffers],
        "end": [b.end for b in buffers],
        "offset": [b.offset for b in buffers],
        "nbytes": [b.nbytes for b in buffers],
        "category": [CATEGORIES.index(b.category) for b in buffers],
        "op": [ops[b.op] for b in buffers],
        "name": [plain(b.name) for b in buffers],
        "later": {k: later for k, b in enumerate(buffers) if (later := _later(b))},
        "ops": [plain(op) for op in ops],
        "categories": [[category, COLORS[category]] for category in CATEGORIES],
        "dashes": DASHES,
        "levels": [[level.kind, level.nbytes] for level in scene.levels],
        "samples": scene.samples,
        "last": scene.last,
        "top": scene.top,
        "peak": [arena.peak_step, arena.lower_bound],
    }


def _later(b: Buffer) -> list[str]:
    """Tensors that reuse the bytes of the buffer's first tensor."""
    names = [name for name in b.tensors if name != b.name]
    num_hidden = len(names) - LATER
    shown = [plain(name) for name in names[:LATER]]
    return [*shown, f"{num_hidden:,} more"] if num_hidden > 0 else shown


def _legend(scene: Scene) -> str:
    """The colours of the rectangles, then the lines."""
    colors = (f"<li>{_swatch(category)}{category}</li>" for category in scene.used())
    lines = (
        f'<li class="line {kind}"><svg><path d="M0 4H28" stroke-dasharray="{DASHES[kind]}"/></svg>{text}</li>'
        for kind, text in scene.lines
    )
    return "".join([*colors, *lines])


def _swatch(category: str) -> str:
    fill = COLORS[category]
    if category == "recomputed":
        fill = f"repeating-linear-gradient(45deg,{COLORS['activation']} 0 2px,{fill} 2px 5px)"
    return f'<i style="background:{fill}"></i>'


def _owners(scene: Scene) -> str:
    """Rows of the largest buffers at the peak; `data-buffer` links a row to its rectangle."""
    places = {b: k for k, b in enumerate(scene.buffers)}
    shown, remaining = scene.owners[:OWNERS], scene.owners[OWNERS:]
    rows = [
        f'<tr data-buffer="{places[b]}"><td class="name">{escape(plain(b.name))}<td>{escape(plain(b.op))}'
        f'<td class="category">{_swatch(b.category)}{b.category}{_numbers(scene, b.nbytes)}'
        for b in shown
    ]
    if remaining:
        nbytes = sum(b.nbytes for b in remaining)
        rows.append(
            f'<tr><td colspan="3">{plural(len(remaining), "other")}{_numbers(scene, nbytes)}'
        )
    return "\n".join(rows)


def _numbers(scene: Scene, nbytes: int) -> str:
    return f'<td class="number">{size_text(nbytes)}<td class="number">{scene.share(nbytes):.1%}'


def _bytes(scene: Scene) -> str:
    """Rows of the bytes table: the plan, its total, measurement and budget."""
    share = scene.arena.nbytes / max(scene.total, 1)
    rows: list[tuple[str, str, int, str]] = [("", *row) for row in scene.rows]
    rows.append(("", "arena", scene.arena.nbytes, f"drawn here, {share:.1%} of the whole"))
    rows.append(("total", "planned", scene.total, ""))
    if scene.measured_peak is not None:
        of_plan = f"{scene.measured_peak / max(scene.total, 1):.1%} of what was planned"
        rows.append(("", "measured", scene.measured_peak, of_plan))
    if scene.budget_nbytes is not None:
        headroom = scene.budget_nbytes - scene.total
        left = f"{size_text(abs(headroom))} {'too little' if headroom < 0 else 'to spare'}"
        rows.append(("", "budget", scene.budget_nbytes, left))
    return "\n".join(
        f'<tr class="{kind}"><td>{escape(plain(label))}<td class="number">{size_text(nbytes)}'
        f"<td>{escape(plain(note, 200))}"
        for kind, label, nbytes, note in rows
    )
