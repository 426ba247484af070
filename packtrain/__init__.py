"""packtrain: a static-graph engine for training language models that live in GGUF files.

`import packtrain as pt`: the nouns (Tensor, Op, Graph), the verbs (differentiate, place, make_plan, run), every op by
name; and the commands as functions (train, finetune, plan, evaluate, generate, chat, quantize, merge), loaded on first
use. Importing this loads neither numba nor torch.
"""

import typing

from packtrain import backends, dtypes, ops
from packtrain.debug import debug
from packtrain.dtypes import bf16, f16, f32, f64, i32, i64, u8
from packtrain.errors import DoesNotFit, InputError
from packtrain.grad import differentiate
from packtrain.graph import Graph
from packtrain.interpret import interpret
from packtrain.ops import *  # noqa: F403
from packtrain.place import Placed, place
from packtrain.planning import Plan, PlanError, make_plan, verify
from packtrain.run import Executor, RunError, Session, Stopped
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

if typing.TYPE_CHECKING:
    from packtrain.library import (
        chat,
        evaluate,
        finetune,
        generate,
        merge,
        plan,
        quantize,
        start,
        train,
    )

_TASKS = ("chat", "evaluate", "finetune", "generate", "merge", "plan", "quantize", "start", "train")

__all__ = [
    "DoesNotFit", "Executor", "Graph", "GraphError", "InputError", "Op", "Placed", "Plan", "PlanError", "RunError",
    "Session", "Spec", "Stopped", "Tensor", "__version__", "backends", "bf16", "chat", "constant", "debug",
    "differentiate", "dtypes", "evaluate", "f16", "f32", "f64", "finetune", "generate", "i32", "i64", "input",
    "interpret", "make_plan", "merge", "named", "op", "ops", "place", "plan", "quantize", "start", "state", "train",
    "u8", "verify", "weight",
    *ops.__all__,
]  # fmt: skip


def __getattr__(name: str) -> typing.Any:
    """The functions of `packtrain.library`, loaded on first use."""
    if name not in _TASKS:
        raise AttributeError(f"module 'packtrain' has no attribute {name!r}")
    from packtrain import library

    return getattr(library, name)
