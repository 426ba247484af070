"""Pictures of a plan: an interactive HTML page, SVG, a trace for Perfetto, text for the terminal."""

from packtrain.planner.plan_view.memory_chart import chart
from packtrain.planner.plan_view.plan_page import page
from packtrain.planner.plan_view.terminal import terminal
from packtrain.planner.plan_view.trace import trace

__all__ = ["chart", "page", "terminal", "trace"]
