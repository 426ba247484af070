"""packtrain choose: the smallest file that keeps what tuning gained, with a table and a picture of all tried."""

import math
from collections.abc import Sequence

from packtrain.cli import DONE, print_message
from packtrain.cli.event_output import TerminalEvents
from packtrain.common.files import check_writable, write_text
from packtrain.engine.memory_plan import size_text
from packtrain.planner.plan_view import memory_chart
from packtrain.planner.plan_view.memory_chart import GRID, INK, LEFT, RIGHT, STRONG, label
from packtrain.workflows.quantization import MIB
from packtrain.workflows.type_choice import ChooseSettings, choose

HEIGHT, BOTTOM = 460, 404
HUES = "#1d4ed8", "#ea580c", "#0f766e", "#7c3aed"

GainPoint = tuple[str, str, int, float]  # method, file name, bytes, retained share of the gain


def run(settings: ChooseSettings) -> int:
    """Write the file, print a line per try; returns the exit code. Raises InputError, DoesNotFit, Interrupted."""
    check_writable(settings.svg, "--svg")
    result = choose(settings, TerminalEvents())
    best = result.best
    if not result.enough:
        print_message(
            f"warning: no file keeps {result.keep:.0%} of the gain; the one that keeps most was written"
        )
    print(
        f"{result.output}: {best.name}, {best.how}, {best.nbytes / MIB:.2f} MiB, keeps {best.kept:.1%}"
    )
    if settings.svg is not None:
        points = [(t.how, t.name, t.nbytes, t.kept) for t in result.tries]
        write_text(settings.svg, gains_svg(points, settings.keep))
        print_message(f"the picture is {settings.svg}")
    return DONE


def gains_svg(points: Sequence[GainPoint], kept_share: float) -> str:
    """Return a chart as SVG: files by size and the share of the gain that they keep, 0 to 1; `kept_share`: --keep."""
    min_share = min(kept_share, *(kept_gain for *_, kept_gain in points))
    low, high = math.floor(100 * min_share) - 1, max(100, *(math.ceil(100 * p[3]) for p in points))
    max_nbytes = max(nbytes for _, _, nbytes, _ in points) * 1.1

    def position(nbytes: float, percent: float) -> tuple[float, float]:
        x_share, y_share = nbytes / max_nbytes, (percent - low) / (high - low)
        return LEFT + (RIGHT - LEFT) * x_share, BOTTOM - (BOTTOM - memory_chart.TOP) * y_share

    title, style = "Size and what is kept of the gain", f'font-size="16" fill="{STRONG}"'
    drawn = [label(24, 34, title, "start", style)]
    for percent in memory_chart.step_ticks(high - low, 8):
        _, y = position(0, low + percent)
        drawn.append(f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="{GRID}"/>')
        drawn.append(label(LEFT - 8, y + 4, f"{low + percent} %", "end"))
    for nbytes in memory_chart.byte_ticks(int(max_nbytes), 8):
        x, _ = position(nbytes, 0)
        drawn.append(f'<path d="M{x:.1f} {BOTTOM}v5" stroke="{INK}"/>')
        drawn.append(label(x, BOTTOM + 19, size_text(nbytes).replace(".0", ""), "middle"))
    _, y = position(0, 100 * kept_share)
    drawn.append(f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="{STRONG}" stroke-dasharray="6 3"/>')
    for method_index, method in enumerate(dict.fromkeys(method for method, *_ in points)):
        color, method_points = HUES[method_index % len(HUES)], [p for p in points if p[0] == method]
        drawn.append(label(24 + 120 * method_index, 58, f"● {method}", "start", f'fill="{color}"'))
        for _, name, nbytes, kept_gain in method_points:
            x, y = position(nbytes, 100 * kept_gain)
            drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}" stroke="#fff"/>')
            drawn.append(label(x + 7, y - 6, name, "start", memory_chart.HALO_STYLE))
    return memory_chart.svg_picture(title, drawn, HEIGHT)
