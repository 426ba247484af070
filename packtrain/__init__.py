"""packtrain: a static-graph engine for training language models that live in GGUF files.

`import packtrain as pt`: the nouns (Tensor, Op, Graph), the verbs (build, differentiate, place, plan, run), and
every op by name. Nothing here loads numba or torch.
"""

from packtrain import backends, dtypes, ops
from packtrain.debug import debug
from packtrain.dtypes import bf16, f16, f32, f64, i32, i64, u8
from packtrain.grad import differentiate
from packtrain.graph import Graph
from packtrain.interpret import interpret
from packtrain.observe import Stopped
from packtrain.ops import *  # noqa: F403
from packtrain.place import Placed, place
from packtrain.plan import Plan, PlanError, make_plan, verify
from packtrain.run import Executor, RunError, Session
from packtrain.tensor import (
    GraphError,
    Op,
    Spec,
    Tensor,
    constant,
    input,
    named,
    op,
    state,
    weight,
)  # fmt: skip
from packtrain.version import __version__

__all__ = [
    "Executor", "Graph", "GraphError", "Op", "Placed", "Plan", "PlanError", "RunError", "Session", "Spec", "Stopped",
    "Tensor", "__version__", "backends", "bf16", "constant", "debug", "differentiate", "dtypes", "f16", "f32", "f64",
    "i32", "i64", "input", "interpret", "make_plan", "named", "op", "ops", "place", "state", "u8", "verify", "weight",
    *ops.__all__,
]  # fmt: skip
