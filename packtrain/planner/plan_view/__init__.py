"""Pictures of a plan: an interactive HTML page, SVG, a trace for Perfetto, text for the terminal."""

from packtrain.planner.plan_view.memory_chart import chart_svg
from packtrain.planner.plan_view.plan_page import page_html
from packtrain.planner.plan_view.terminal import terminal_text
from packtrain.planner.plan_view.trace import trace_json
