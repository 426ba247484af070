"""packtrain: a static-graph engine for training language models that live in GGUF files.

`import packtrain as pt`: the nouns (Tensor, Op, Graph), the verbs (differentiate, place, make_plan, run), every op by
name; the training of any model (fit, Model, Dataset, Trainer, save, load) with the optimizers; and the commands as
functions (train, finetune, plan, evaluate, compare, choose, generate, chat, embed, quantize, merge). All is loaded on
first use, the commands and the optimizers apart from the engine. Importing this loads neither numba nor torch.
"""

import importlib
import importlib.util
import typing

from packtrain.debug import debug
from packtrain.errors import DoesNotFit, InputError
from packtrain.version import __version__

if typing.TYPE_CHECKING:
    from packtrain import backends, dtypes, ops
    from packtrain.context import CacheFull, Context, ContextError
    from packtrain.dtypes import bf16, f16, f32, f64, i32, i64, u8
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
    from packtrain.grad import differentiate
    from packtrain.graph import Graph
    from packtrain.interpreting import interpret
    from packtrain.library import (
        chat,
        choose,
        compare,
        embed,
        evaluate,
        finetune,
        generate,
        merge,
        plan,
        quantize,
        start,
        train,
    )
    from packtrain.ops import *  # noqa: F403
    from packtrain.optim import LBFGS, SGD, AdamW, Muon
    from packtrain.placing import Placed, place
    from packtrain.planning import Plan, PlanError, least_order, make_plan, verify
    from packtrain.run import Executor, RunError, Session, Stopped
    from packtrain.sampling import Chain, Sampling
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
    )

    __all__ = [
        "LBFGS", "SGD", "AdamW", "CacheFull", "Callbacks", "Chain", "Context", "ContextError",
        "Dataset", "DoesNotFit", "Executor", "Fitted", "Graph",
        "GraphError", "InputError", "Model", "Muon", "Op", "Placed", "Plan", "PlanError", "Result",
        "RunError", "Sampling", "Session", "Spec", "Stopped", "Tensor", "Trainer", "__version__", "backends", "bf16",
        "chat", "choose", "compare", "constant", "debug", "differentiate", "dtypes", "embed", "epoch", "evaluate",
        "f16", "f32", "f64", "finetune", "fit", "generate", "i32", "i64", "input", "interpret", "least_order", "load",
        "make_plan", "merge", "named", "op", "ops", "place", "plan", "quantize", "save", "start", "state",
        "train", "u8", "verify", "weight",
    ]  # fmt: skip

_LATE = {
    "library": (
        "chat", "choose", "compare", "embed", "evaluate", "finetune", "generate", "merge", "plan", "quantize", "start",
        "train",
    ),
    "context": ("CacheFull", "Context", "ContextError"),
    "fitting": (
        "Callbacks", "Dataset", "Fitted", "Model", "Result", "Trainer", "epoch", "fit", "load", "save",
    ),
    "optim": ("LBFGS", "SGD", "AdamW", "Muon"),
    "dtypes": ("bf16", "f16", "f32", "f64", "i32", "i64", "u8"),
    "grad": ("differentiate",),
    "graph": ("Graph",),
    "interpreting": ("interpret",),
    "placing": ("Placed", "place"),
    "planning": ("Plan", "PlanError", "least_order", "make_plan", "verify"),
    "run": ("Executor", "RunError", "Session", "Stopped"),
    "sampling": ("Chain", "Sampling"),
    "tensor": (
        "GraphError", "Op", "Spec", "Tensor", "constant", "input", "named", "op", "state", "weight",
    ),
}  # fmt: skip
_THERE = ("DoesNotFit", "InputError", "__version__", "backends", "debug", "dtypes", "ops")


def _names() -> list[str]:
    """All that is public, in ruff's order, and then the ops."""
    names = [*_THERE, *(name for late in _LATE.values() for name in late)]
    names.sort(key=lambda name: (not name.isupper(), name))
    return [*names, *importlib.import_module("packtrain.ops").__all__]


def __dir__() -> list[str]:
    return _names()


def __getattr__(name: str) -> typing.Any:
    """What is loaded on first use."""
    if name == "__all__":
        return _names()
    home = next((module for module, names in _LATE.items() if name in names), None)
    if home is None and not name.startswith("_"):
        if importlib.util.find_spec(f"packtrain.{name}"):
            return importlib.import_module(f"packtrain.{name}")
        home = "ops"
    found = getattr(importlib.import_module(f"packtrain.{home}"), name, None) if home else None
    if found is None:
        raise AttributeError(f"module 'packtrain' has no attribute {name!r}")
    globals()[name] = found
    return found
