"""Pictures of a plan: an interactive HTML page, SVG, a trace for Perfetto, text for the terminal."""

from packtrain.picture.chart import chart
from packtrain.picture.page import page
from packtrain.picture.terminal import terminal
from packtrain.picture.trace import trace

__all__ = ["chart", "page", "terminal", "trace"]
