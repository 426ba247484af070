"""packtrain: a static-graph engine for training language models that live in GGUF files.

`import packtrain as pt`: the nouns (Tensor, Op, Graph), the verbs (differentiate, place, make_plan, run), every op by
name; the training of any model (fit, Model, Dataset, Trainer, save, load) with the optimizers; and the commands as
functions (train, finetune, plan, evaluate, generate, chat, quantize, merge). The last two are loaded on first use.
Importing this loads neither numba nor torch.
"""

import importlib
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
from packtrain.planning import Plan, PlanError, least_order, make_plan, verify
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
    from packtrain.fitting import (
        Callbacks,
        Dataset,
        Fitted,
        Model,
        Result,
        Trainer,
        epoch,
        fit,
        load,
        save,
    )
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
    from packtrain.optim import LBFGS, SGD, AdamW, Muon

_LATE = {
    "library": ("chat", "evaluate", "finetune", "generate", "merge", "plan", "quantize", "start", "train"),
    "fitting": (
        "Callbacks", "Dataset", "Fitted", "Model", "Result", "Trainer", "epoch", "fit", "load", "save",
    ),
    "optim": ("LBFGS", "SGD", "AdamW", "Muon"),
}  # fmt: skip

__all__ = [
    "LBFGS", "SGD", "AdamW", "Callbacks", "Dataset", "DoesNotFit", "Executor", "Fitted", "Graph", "GraphError",
    "InputError",
    "Model", "Muon", "Op", "Placed", "Plan", "PlanError", "Result", "RunError", "Session", "Spec", "Stopped",
    "Tensor", "Trainer", "__version__", "backends", "bf16", "chat", "constant", "debug", "differentiate", "dtypes",
    "epoch", "evaluate", "f16", "f32", "f64", "finetune", "fit", "generate", "i32", "i64", "input", "interpret",
    "least_order", "load", "make_plan", "merge", "named", "op", "ops", "place", "plan", "quantize", "save", "start",
    "state", "train", "u8", "verify", "weight",
    *ops.__all__,
]  # fmt: skip


def __getattr__(name: str) -> typing.Any:
    """What is loaded on first use."""
    for module, names in _LATE.items():
        if name in names:
            return getattr(importlib.import_module(f"packtrain.{module}"), name)
    raise AttributeError(f"module 'packtrain' has no attribute {name!r}")
