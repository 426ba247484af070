"""Pictures of a plan: they say what the plan says, hold to their sizes, and no name in them becomes markup."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import packtrain.planner.plan_view
from packtrain.engine.memory_plan import Arena, Buffer, Plan, make_plan, size_text
from packtrain.engine.optim import AdamW
from packtrain.engine.placement import Placed, place
from packtrain.planner.plan_view import chart_svg, page_html, terminal_text, trace_json
from packtrain.planner.plan_view.memory_chart import (
    BELOW,
    BOTTOM,
    LEFT,
    LIVE_TOP,
    RIGHT,
    TOP,
    byte_ticks,
    step_ticks,
)
from packtrain.planner.plan_view.scene import (
    CATEGORIES,
    NUM_PEAK_BUFFERS,
    READING_HINT,
    PlanScene,
    fullest_steps,
)
from packtrain.planner.plan_view.terminal import MARGIN, NUM_LINES
from tests import models
from tests.browser import chromium

MIB = 1 << 20
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</script><script>alert(1)</script>&<img src=x onerror=alert(1)>\"'\x1b[2J\u202e\ud800\0"
SHOWN = "</script><script>alert(1)</script>&<img src=x onerror=alert(1)>\"'�[2J���"


def buffer(name: str, start: int, end: int, offset: int, nbytes: int, **fields: Any) -> Buffer:
    about = {"op": "matmul", "category": "activation", "space": "host", "tensors": (name,)} | fields
    return Buffer(name=name, start=start, end=end, offset=offset, nbytes=nbytes, **about)


def alive(plan: Plan, step: int) -> int:
    return sum(b.nbytes for b in plan.buffers if b.start <= step < b.end)


def plan_of(*buffers: Buffer, weight_nbytes: int = 0) -> Plan:
    steps = max((b.end for b in buffers), default=0)
    height = max((b.offset + b.nbytes for b in buffers), default=0)
    change = [0] * (steps + 1)
    for b in buffers:
        change[b.start] += b.nbytes
        change[b.end] -= b.nbytes
    counts = list(accumulate(change))
    bound = max(counts)
    arena = Arena("host", height, bound, counts.index(bound), weight_nbytes, 0, 0)
    return Plan("f" * 16, steps, (arena,), buffers)


def small_plan(name: str = "h", op: str = "matmul") -> Plan:
    """Eight steps. The peak, 4 MiB, is at step 3; the arena needs no more."""
    return plan_of(
        buffer("tokens", 0, 4, 3 * MIB, MIB, op="input", category="input"),
        buffer(name, 1, 5, 0, 2 * MIB, op=op, tensors=(name, f"{name} again")),
        buffer("work", 3, 4, 2 * MIB, MIB, category="workspace", tensors=()),
        buffer("x again", 5, 8, 0, MIB, category="recomputed"),
        buffer("d/x", 6, 8, 2 * MIB, MIB, category="gradient"),
        weight_nbytes=6 * MIB,
    )


@pytest.fixture(scope="module")
def placed() -> Placed:
    """A training step that recomputes its blocks."""
    return place(models.step_graph(models.CONFIG, 2, 16, AdamW(), keep="blocks"))


@pytest.fixture(scope="module")
def plan(placed: Placed) -> Plan:
    return make_plan(placed)


@pytest.fixture(scope="module")
def large_plan() -> Plan:
    """10,000 buffers whose names are as long as GGUF allows."""
    names = [f"blk.{k:05}.".ljust(64, "w") for k in range(10_000)]
    size = 123 * MIB
    return plan_of(
        *(
            buffer(
                name,
                k,
                k + 1 + k % 7,
                k % 8 * size,
                size,
                category=CATEGORIES[k % 6],
                tensors=(name, name[:-9] + " reshaped"),
            )
            for k, name in enumerate(names)
        )
    )


# ---- what all show -------------------------------------------------------------------------------------------


def test_live_bytes_are_those_of_the_buffers(plan: Plan) -> None:
    scene = PlanScene(plan, "host", title="")
    assert scene.live_nbytes.sum(axis=0).tolist() == [alive(plan, t) for t in range(scene.last)]
    for k, category in enumerate(CATEGORIES):
        of_kind = [b for b in plan.buffers if b.category == category]
        assert scene.live_nbytes[k].sum() == sum(b.nbytes * (b.end - b.start) for b in of_kind)
    assert scene.used() == CATEGORIES  # a recomputing step of training has them all


@pytest.mark.parametrize("parts", [1, 3, 8, 20])
def test_of_each_stretch_of_time_the_fullest_step_is_shown(parts: int) -> None:
    plan = small_plan()
    steps = fullest_steps(PlanScene(plan, "host", title="").live_nbytes, parts).tolist()
    assert len(steps) == parts and steps == sorted(steps)
    assert plan.arena().peak_step in steps


def level_nbytes(scene: PlanScene) -> dict[str, int]:
    return {level.line_kind: level.nbytes for level in scene.levels}


def test_the_budget_line_is_what_the_rows_leave() -> None:
    plan, rows = small_plan(), [("weights", 6 * MIB, ""), ("process", 90 * MIB, "")]
    for budget, line in ((100, None), (101, 5 * MIB), (96, None), (95, None), (105, None)):
        scene = PlanScene(plan, "host", title="", rows=rows, budget_nbytes=budget * MIB)
        expected = 4 * MIB if budget == 100 else line
        assert level_nbytes(scene).get("budget") == expected, budget
        assert scene.total_nbytes == 100 * MIB


def test_a_gap_has_two_lines() -> None:
    gapped_plan = plan_of(buffer("a", 0, 2, 0, MIB), buffer("b", 1, 3, 3 * MIB, MIB))
    assert level_nbytes(PlanScene(gapped_plan, "host", title="")) == {
        "bound": 2 * MIB,
        "arena": 4 * MIB,
    }
    assert "100.00% over its lower bound" in page_html(gapped_plan)
    assert level_nbytes(PlanScene(small_plan(), "host", title="")) == {"bound": 4 * MIB}


@pytest.mark.parametrize("draw", [page_html, chart_svg, trace_json, terminal_text])
def test_a_plan_without_buffers_has_pictures(draw: Any) -> None:
    assert draw(plan_of())


# ---- the page ------------------------------------------------------------------------------------------------


class ParsedPage(HTMLParser):
    """Elements, scripts, and the cells of tables row by row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.rows: list[list[str]] = []
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = self.inside if tag == "i" else tag
        if tag == "script":
            self.scripts.append("")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside if tag == "i" else ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data
        if self.inside in ("td", "th"):
            self.rows[-1][-1] += data.strip()

    @property
    def data(self) -> dict[str, Any]:
        payload: dict[str, Any] = json.loads(self.scripts[0])
        return payload


def test_the_page_draws_every_buffer(plan: Plan) -> None:
    data = ParsedPage(page_html(plan)).data
    for field in ("start", "end", "offset", "nbytes", "name"):
        assert data[field] == [getattr(b, field) for b in plan.buffers], field
    assert [data["ops"][k] for k in data["op"]] == [b.op for b in plan.buffers]
    kinds = [data["categories"][k][0] for k in data["category"]]
    assert kinds == [b.category for b in plan.buffers]
    later = {str(k): list(b.tensors[1:]) for k, b in enumerate(plan.buffers) if b.tensors[1:]}
    assert later and all(len(names) <= 6 for names in later.values())
    assert data["later"] == later
    assert data["peak"] == [plan.arena().peak_step, plan.arena().lower_bound]


def test_a_long_chain_is_counted() -> None:
    names = tuple(f"t{k}" for k in range(1_010))
    data = ParsedPage(page_html(plan_of(buffer("t0", 0, 1, 0, 64, tensors=names)))).data
    assert data["later"] == {"0": [*names[1:7], "1,003 more"]}


def test_the_page_needs_nothing_and_runs_only_its_own_script(plan: Plan) -> None:
    text = page_html(plan)
    read = ParsedPage(text)
    assert (
        "<!--" not in text
        and "url(" not in text
        and "@import" not in text
        and "//"
        not in "".join(value or "" for _, attributes in read.tags for value in attributes.values())
    )
    names = {name for _, attributes in read.tags for name in attributes}
    assert not names & {"src", "href", "srcset", "action"}
    assert not any(name.startswith("on") for name in names)
    policy = next(a["content"] for _, a in read.tags if "http-equiv" in a)
    seal = base64.b64encode(hashlib.sha256(read.scripts[1].encode()).digest()).decode()
    assert policy is not None and "default-src 'none'" in policy
    assert f"script-src 'sha256-{seal}'" in policy
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval", read.scripts[1]
    )


def test_a_hostile_name_stays_a_name() -> None:
    rows = [(HOSTILE, MIB, HOSTILE)]
    text = page_html(small_plan(HOSTILE, HOSTILE), title=HOSTILE, rows=rows)
    reference = ParsedPage(page_html(small_plan()))
    read = ParsedPage(text)
    assert [tag for tag, _ in read.tags] == [tag for tag, _ in reference.tags]
    assert len(read.scripts) == 2 and read.scripts[1] == reference.scripts[1]
    assert not set("<>&") & set(read.scripts[0])
    assert read.data["name"][1] == SHOWN
    assert read.data["later"]["1"][0] == (SHOWN + " again")[:80]
    assert read.rows[1][:2] == [SHOWN, SHOWN]
    text.encode()


def test_the_owners_of_the_peak_are_a_table(plan: Plan) -> None:
    rows = ParsedPage(page_html(plan)).rows
    assert rows[0] == ["name", "op", "category", "bytes", "share"]
    owners, remaining = plan.peak()[:NUM_PEAK_BUFFERS], plan.peak()[NUM_PEAK_BUFFERS:]
    assert len(owners) == NUM_PEAK_BUFFERS and remaining
    bound = plan.arena().lower_bound
    assert rows[1 : NUM_PEAK_BUFFERS + 1] == [
        [b.name, b.op, b.category, size_text(b.nbytes), f"{b.nbytes / bound:.1%}"] for b in owners
    ]
    rest = sum(b.nbytes for b in remaining)
    last = [f"{len(remaining)} others", size_text(rest), f"{rest / bound:.1%}"]
    assert rows[NUM_PEAK_BUFFERS + 1] == last
    assert alive(plan, plan.arena().peak_step) == sum(b.nbytes for b in [*owners, *remaining])


def test_all_bytes_are_a_table() -> None:
    rows = [("weights", 6 * MIB, "trained"), ("process", 90 * MIB, "as measured")]
    text = page_html(small_plan(), rows=rows, budget_nbytes=110 * MIB, measured=99 * MIB)
    assert ParsedPage(text).rows[-6:] == [
        ["weights", "6.0 MiB", "trained"],
        ["process", "90.0 MiB", "as measured"],
        ["arena", "4.0 MiB", "drawn here, 4.0% of the whole"],
        ["planned", "100.0 MiB", ""],
        ["measured", "99.0 MiB", "99.0% of what was planned"],
        ["budget", "110.0 MiB", "10.0 MiB to spare"],
    ]
    assert ParsedPage(text).data["samples"] == [[0, 3 * MIB], [8, 3 * MIB]]
    tight = ParsedPage(page_html(small_plan(), budget_nbytes=9 * MIB)).rows
    assert tight[-4] == ["weights", "6.0 MiB", "trained and frozen weights"]
    assert tight[-1] == ["budget", "9.0 MiB", "1.0 MiB too little"]


def test_samples_are_drawn_over_the_steps() -> None:
    samples = [(0.0, 7 * MIB), (2.5, 10 * MIB), (8.0, 5 * MIB)]
    data = ParsedPage(page_html(small_plan(), measured=samples)).data
    assert data["samples"] == [[0, MIB], [2.5, 4 * MIB], [8, 0]]  # beside 6 MiB of weights
    assert "measured 10.0 MiB</li>" in page_html(small_plan(), measured=samples)


def test_sizes_of_files(large_plan: Plan) -> None:
    assert len(page_html(large_plan).encode()) <= 2_000_000
    assert len(chart_svg(large_plan).encode()) <= 200_000
    folder = Path(packtrain.planner.plan_view.__file__).parent
    for name in ("page.js", "page.html"):
        assert len((folder / name).read_text().splitlines()) <= 400, name


# ---- the drawing ---------------------------------------------------------------------------------------------


def paths_by_fill(text: str) -> dict[str, str]:
    """By their fill."""
    elements = ElementTree.fromstring(text).findall(f"{SVG}path")
    return {p.attrib["fill"]: p.attrib["d"] for p in reversed(elements) if "fill" in p.attrib}


def test_rectangles_stand_where_the_plan_says() -> None:
    text = chart_svg(small_plan())
    drawn = paths_by_fill(text)["url(#hatch)"]  # x again: steps 5 to 8, the lowest MiB
    x, y, end, base = (float(n) for n in re.findall(r"[\d.]+", drawn)[:4])
    step, mib = (
        (RIGHT - LEFT) / 8,
        (BOTTOM - TOP) * MIB / PlanScene(small_plan(), "host", title="").max_nbytes,
    )
    gap = 0.5
    assert (x, end) == pytest.approx((LEFT + 5 * step, RIGHT - gap), abs=0.06)
    assert (y, base) == pytest.approx((BOTTOM - mib, BOTTOM - gap), abs=0.06)
    assert text.count('"url(#hatch)"') == 2 + 1  # rectangles and bytes alive, and the legend


def test_bytes_alive_stand_under_their_steps() -> None:
    elements = ElementTree.fromstring(chart_svg(small_plan())).findall(f"{SVG}path")
    stacks = [p.attrib["d"] for p in elements if p.attrib["d"].startswith(f"M{LEFT} {BELOW}V")]
    top = PlanScene(small_plan(), "host", title="").max_nbytes
    heights = [float(y) for y in re.findall(r"V([\d.]+)h", stacks[0])]  # the first is the highest
    expected = [BELOW - (BELOW - LIVE_TOP) * alive(small_plan(), t) / top for t in range(8)]
    assert heights == pytest.approx(expected, abs=0.06)


def test_names_in_a_drawing_are_text() -> None:
    root = ElementTree.fromstring(chart_svg(small_plan(HOSTILE, HOSTILE), title=HOSTILE))
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert SHOWN in texts and any(SHOWN[:20] in text and "activation" in text for text in texts)
    assert not list(root.iter(f"{SVG}script"))


def test_a_drawing_says_what_was_measured() -> None:
    root = ElementTree.fromstring(chart_svg(small_plan(), budget_nbytes=11 * MIB, measured=9 * MIB))
    texts = {element.text for element in root.iter(f"{SVG}text")}
    assert {"measured 9.0 MiB", "budget leaves 5.0 MiB", "peak at op 3: 4.0 MiB alive"} <= texts
    assert len(root.findall(f"{SVG}polyline")) == 1


def test_ticks_are_round() -> None:
    assert byte_ticks(5 * MIB, 8) == [k * MIB for k in range(6)]
    assert byte_ticks(0, 8) == [0]
    assert step_ticks(377, 10) == list(range(0, 378, 50))
    assert step_ticks(1, 10) == [0, 1]


def close_lines() -> dict[str, Any]:
    """Arguments of a picture in which the lines of arena and budget are next to each other."""
    buffers = buffer("a", 0, 2, 0, MIB), buffer("b", 1, 3, 3 * MIB, MIB)
    samples = [(0.0, MIB), (1.5, 4 * MIB), (3.0, 2 * MIB)]
    return {"plan": plan_of(*buffers), "budget_nbytes": int(4.05 * MIB), "measured": samples}


LINES_NAMED = ["lower bound 2.0 MiB", "arena 4.0 MiB", "budget leaves 4.0 MiB", "measured 4.0 MiB"]


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1120])
def test_a_page_says_how_to_read_it_and_names_lines_beside_the_drawing(width: int) -> None:
    with chromium() as browser:
        opened = browser.new_page(viewport={"width": width, "height": 800})
        opened.set_content(page_html(**close_lines()))
        assert opened.locator("#reading").inner_text() == READING_HINT
        assert opened.locator("li.line").all_inner_texts() == LINES_NAMED
        boxes = opened.evaluate(BOXES, "li, #plot, .hint")
        assert not crossing(boxes) and all(box[2] <= width for box in boxes)


@pytest.mark.browser
def test_no_line_of_a_drawing_goes_through_a_text() -> None:
    with chromium() as browser:
        opened = browser.new_page()
        opened.set_content(chart_svg(**close_lines()))
        texts = opened.locator("svg text").all_text_contents()
        assert READING_HINT in texts and set(LINES_NAMED) <= set(texts)
        drawn = opened.evaluate(BOXES, "svg text, svg path, svg polyline")
        texts = opened.evaluate(BOXES, "svg text")
        assert not [t for t in texts if sum(overlap(t, box) for box in drawn) > 1]  # itself


BOXES = """selector => [...document.querySelectorAll(selector)].flatMap(one => {
  const parts = (one.getAttribute("d") ?? "").split(/(?=M)/);
  if (parts.length < 2) { const r = one.getBoundingClientRect(); return [[r.left, r.top, r.right, r.bottom]]; }
  const copy = one.cloneNode();
  one.after(copy);
  return parts.map(part => {
    copy.setAttribute("d", part);
    const r = copy.getBoundingClientRect();
    return [r.left, r.top, r.right, r.bottom];
  });
})"""


def overlap(a: list[float], b: list[float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def crossing(boxes: list[list[float]]) -> list[tuple[list[float], list[float]]]:
    return [(a, b) for k, a in enumerate(boxes) for b in boxes[:k] if overlap(a, b)]


# ---- the trace -----------------------------------------------------------------------------------------------


def events(plan: Plan, *ops: str) -> list[dict[str, Any]]:
    trace_events: list[dict[str, Any]] = json.loads(trace_json(plan, ops))["traceEvents"]
    return trace_events


def test_the_trace_counts_live_bytes(plan: Plan) -> None:
    counted = {e["ts"]: e["args"]["bytes"] for e in events(plan) if e["ph"] == "C"}
    now = -1
    for step in range(plan.steps + 2):
        now = counted.get(step, now)
        assert now == alive(plan, step)
    values = list(counted.values())
    assert all(a != b for a, b in pairwise(values))


def test_each_buffer_is_a_slice_and_slices_of_a_thread_do_not_cross(
    placed: Placed, plan: Plan
) -> None:
    ops = [step.op.name for step in placed.steps]
    trace_events = events(plan, *ops)
    threads = {e["tid"]: e["args"]["name"] for e in trace_events if e["name"] == "thread_name"}
    slices = [e for e in trace_events if e["ph"] == "X"]
    buffers = [e for e in slices if e["tid"]]
    assert sorted((e["name"], e["ts"], e["dur"], e["args"]["bytes"]) for e in buffers) == sorted(
        (b.name, b.start, b.end - b.start, b.nbytes) for b in plan.buffers
    )
    assert all(threads[e["tid"]].startswith(f"{e['cat']} ") for e in buffers)
    assert [(e["name"], e["ts"]) for e in slices if not e["tid"]] == list(
        zip(ops, range(plan.steps), strict=True)
    )
    for thread in threads:
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == thread)
        assert all(a[1] <= b[0] for a, b in pairwise(spans)), threads[thread]


def test_a_category_has_no_more_threads_than_buffers_at_once(plan: Plan) -> None:
    names = [e["args"]["name"] for e in events(plan) if e["name"] == "thread_name"]
    for category in CATEGORIES:
        category_buffers = [b for b in plan.buffers if b.category == category]
        max_alive = max(
            sum(b.start <= t < b.end for b in category_buffers) for t in range(plan.steps + 1)
        )
        assert sum(name.startswith(f"{category} ") for name in names) == max_alive


def test_a_hostile_name_in_a_trace_can_be_read() -> None:
    slices = [e for e in events(small_plan(HOSTILE, HOSTILE), *[HOSTILE] * 8) if e["ph"] == "X"]
    assert sum(e["name"] == SHOWN for e in slices) == 8 + 1
    assert any(e.get("args", {}).get("tensors", [""])[0] == SHOWN for e in slices)


# ---- the terminal --------------------------------------------------------------------------------------------


def uncolored_lines(text: str) -> list[str]:
    return re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()


@pytest.mark.parametrize("width", [40, 80, 132])
@pytest.mark.parametrize("color", [False, True])
def test_lines_fit_the_terminal(plan: Plan, width: int, color: bool) -> None:
    text = terminal_text(
        plan, width, color=color, title="t" * 200, budget_nbytes=1 << 40, measured=1 << 39
    )
    lines = uncolored_lines(text)
    assert all(len(line) <= width for line in lines)
    assert sum("┤" in line and len(line) == width for line in lines) == NUM_LINES
    assert color == ("\x1b" in text)


def test_the_terminal_shows_addresses_over_time() -> None:
    lines = terminal_text(small_plan(), 8 * 9 + MARGIN).splitlines()
    picture = [line[MARGIN:] for line in lines if "┤" in line]
    # the fifth column of each step, from the top; 4 MiB and some air are 28 heights
    eighth = {k: "".join(line[9 * k + 4] for line in picture) for k in range(8)}
    assert eighth[0] == " ▪▪▪▀         "
    assert eighth[2] == " ▪▪▪▀  ▄██████"
    assert "░" in eighth[3] and "░" not in eighth[2] + eighth[4]
    assert "▓" in eighth[7] and "▒" in eighth[7] and "▒" not in eighth[5]
    assert lines[-4] == "at the peak, op 3, 4.0 MiB are alive:"
    bars = next(line for line in lines if "alive  " in line)[MARGIN:]
    assert bars == "".join(9 * bar for bar in "▂▆▆█▄▂▄▄")


def test_an_arrow_stands_under_the_peak() -> None:
    late_plan = plan_of(buffer("a", 0, 8, 0, MIB), buffer("b", 7, 8, MIB, MIB))
    for plan, said in ((small_plan(), "↑ peak, op 3"), (late_plan, "peak, op 7 ↑")):
        lines = terminal_text(plan, 60).splitlines()
        at = next(k for k, line in enumerate(lines) if said in line)
        assert lines[at - 1][lines[at].index("↑")] == "█" and len(lines[at]) <= 60


def test_half_blocks_in_colour_have_two_heights() -> None:
    uncolored, colored = (
        uncolored_lines(terminal_text(small_plan(), 80, color=color)) for color in (False, True)
    )
    free = [[c == " " for c in line[MARGIN:]] for line in uncolored if "┤" in line]
    assert free == [[c == " " for c in line[MARGIN:]] for line in colored if "┤" in line]
    assert set("".join(line[MARGIN:] for line in colored if "┤" in line)) <= set("▀▄ ")


def test_a_hostile_name_does_not_reach_the_terminal() -> None:
    text = terminal_text(small_plan(HOSTILE, HOSTILE), 80, title=HOSTILE)
    assert all(c.isprintable() for line in text.split("\n") for c in line)
    assert "</script>" in text
