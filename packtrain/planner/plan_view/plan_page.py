"""Shows a plan as one interactive HTML page, which loads nothing and allows only its own script.

page.html has the frame, common/web_page.css the shared style, page.js draws and handles events. Tables are
written here, so that they work without the script."""

import json
from html import escape
from typing import Any, Unpack

from packtrain.common.text import plural
from packtrain.common.web_page import asset_text, common_style, content_hash, script_safe
from packtrain.engine.memory_plan import Buffer, Plan, size_text
from packtrain.planner.plan_view import scene as scenes
from packtrain.planner.plan_view.scene import COLORS, PlanScene, printable_text

MAX_LATER_NAMES = 6  # names shown of tensors that reuse a rectangle's bytes; others are counted


def page_html(plan: Plan, **about: Unpack[scenes.SceneOptions]) -> str:
    """Return an interactive HTML page that shows the plan without loading anything. `about`: see SceneOptions."""
    scene = scenes.PlanScene(plan, **about)
    script = asset_text(__package__, "page.js")
    sections = {
        "title": escape(scene.heading), "summary": escape(scene.summary), "reading": scenes.READING_HINT,
        "seal": content_hash(script), "legend": _legend(scene), "owners": _peak_buffer_rows(scene),
        "bytes": _byte_rows(scene), "data": script_safe(json.dumps(_script_data(scene), separators=(",", ":"))),
        "script": script, "style": common_style(),
    }  # fmt: skip
    page_text = asset_text(__package__, "page.html")
    # no part can contain another's placeholder: names and titles are escaped, and the script has none
    for name, section in sections.items():
        page_text = page_text.replace(f"<!--{name}-->", section)
    return page_text


def _script_data(scene: PlanScene) -> dict[str, Any]:
    """Return what page.js draws, for JSON: buffers as one list for each field, and levels, samples and the peak."""
    buffers = scene.buffers
    op_indices = {op: k for k, op in enumerate(dict.fromkeys([b.op for b in buffers]))}
    arena = scene.arena
    return {
        "start": [b.start for b in buffers], "end": [b.end for b in buffers], "offset": [b.offset for b in buffers],
        "nbytes": [b.nbytes for b in buffers], "category": [scenes.CATEGORIES.index(b.category) for b in buffers],
        "op": [op_indices[b.op] for b in buffers], "name": [printable_text(b.name) for b in buffers],
        "later": {k: names for k, b in enumerate(buffers) if len(b.tensors) > 1 and (names := _later_names(b))},
        "ops": [printable_text(op) for op in op_indices],
        "categories": [[category, COLORS[category]] for category in scenes.CATEGORIES], "dashes": scenes.DASHES,
        "levels": [[level.line_kind, level.nbytes] for level in scene.levels], "samples": scene.samples,
        "last": scene.last, "top": scene.max_nbytes, "peak": [arena.peak_step, arena.lower_bound],
    }  # fmt: skip


def _later_names(b: Buffer) -> list[str]:
    """Return names of the tensors that reuse the bytes of the buffer's first tensor, at most MAX_LATER_NAMES."""
    names = b.tensors[1:]
    num_hidden = len(names) - MAX_LATER_NAMES
    visible_names = [*map(printable_text, names[:MAX_LATER_NAMES])]
    return [*visible_names, f"{num_hidden:,} more"] if num_hidden > 0 else visible_names


def _legend(scene: PlanScene) -> str:
    """Return the legend as HTML list items: the colours of categories, then the kinds of lines."""
    color_items = (f"<li>{_color_swatch(category)}{category}</li>" for category in scene.used())
    line_items = (
        f'<li class="line {kind}"><svg><path d="M0 4H28" stroke-dasharray="{scenes.DASHES[kind]}"/></svg>{text}</li>'
        for kind, text in scene.legend_lines
    )
    return "".join([*color_items, *line_items])


def _color_swatch(category: str) -> str:
    fill = COLORS[category]
    if category == "recomputed":
        fill = f"repeating-linear-gradient(45deg,{COLORS['activation']} 0 2px,{fill} 2px 5px)"
    return f'<i style="background:{fill}"></i>'


def _peak_buffer_rows(scene: PlanScene) -> str:
    """Return HTML table rows of the largest buffers at the peak; `data-buffer` links a row to its rectangle."""
    buffer_indices = {id(b): k for k, b in enumerate(scene.buffers)}
    shown, remaining = scene.peak_buffers
    table_rows = [
        f'<tr data-buffer="{buffer_indices[id(b)]}"><td class="name">{escape(printable_text(b.name))}'
        f"<td>{escape(printable_text(b.op))}"
        f'<td class="category">{_color_swatch(b.category)}{b.category}{_number_cells(scene, b.nbytes)}'
        for b in shown
    ]
    if remaining:
        nbytes = sum(b.nbytes for b in remaining)
        cells = _number_cells(scene, nbytes)
        table_rows.append(f'<tr><td colspan="3">{plural(len(remaining), "other")}{cells}')
    return "\n".join(table_rows)


def _number_cells(scene: PlanScene, nbytes: int) -> str:
    return f'<td class="number">{size_text(nbytes)}<td class="number">{scene.share(nbytes):.1%}'


def _byte_rows(scene: PlanScene) -> str:
    """Return HTML table rows of all bytes of the process: by purpose, their total, the measured peak, the budget."""
    share = scene.arena.nbytes / max(scene.total_nbytes, 1)
    table_rows: list[tuple[str, str, int, str]] = [("", *row) for row in scene.memory_rows]
    table_rows.append(("", "arena", scene.arena.nbytes, f"drawn here, {share:.1%} of the whole"))
    table_rows.append(("total", "planned", scene.total_nbytes, ""))
    if scene.measured_peak is not None:
        share_text = f"{scene.measured_peak / max(scene.total_nbytes, 1):.1%} of what was planned"
        table_rows.append(("", "measured", scene.measured_peak, share_text))
    if scene.budget_nbytes is not None:
        headroom = scene.budget_nbytes - scene.total_nbytes
        headroom_text = f"{size_text(abs(headroom))} {'too little' if headroom < 0 else 'to spare'}"
        table_rows.append(("", "budget", scene.budget_nbytes, headroom_text))
    return "\n".join(
        f'<tr class="{row_class}"><td>{escape(printable_text(row_label))}<td class="number">{size_text(nbytes)}'
        f"<td>{escape(printable_text(note, 200))}"
        for row_class, row_label, nbytes, note in table_rows
    )
