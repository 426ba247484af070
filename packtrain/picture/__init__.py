"""Pictures of a plan: a page to explore, a drawing, a trace for Perfetto, a rendering for the terminal."""

from packtrain.picture.chart import chart
from packtrain.picture.page import page
from packtrain.picture.terminal import terminal
from packtrain.picture.trace import trace

__all__ = ["chart", "page", "terminal", "trace"]
