"""packtrain: a static-graph engine for training language models that live in GGUF files.

`import packtrain as pt`: the nouns (Tensor, Op, Graph), the verbs (differentiate, place, make_plan, run), every op by
name; the training of any model (fit, Model, Dataset, Trainer, save, load) with the optimizers; and the commands as
functions (train, finetune, plan, evaluate, compare, choose, generate, chat, embed, quantize, merge). Every name is
loaded on first use, the commands and the optimizers apart from the engine. Importing packtrain loads neither numba nor
torch.
"""

import importlib
import importlib.util
import typing

from packtrain.common.debug import debug
from packtrain.common.errors import DoesNotFit, InputError
from packtrain.common.version import __version__

if typing.TYPE_CHECKING:
    from packtrain import dtypes
    from packtrain.api import (
        chat, choose, compare, embed, evaluate, finetune, generate, merge, options, plan, quantize, start,
        train,
    )  # fmt: skip
    from packtrain.dtypes import bf16, f16, f32, f64, i32, i64, u8
    from packtrain.engine import backends, ops
    from packtrain.engine.autodiff import differentiate
    from packtrain.engine.executor import Executor, RunError, Session, Stopped
    from packtrain.engine.graph import Graph
    from packtrain.engine.interpreter import interpret
    from packtrain.engine.memory_plan import Plan, PlanError, least_order, make_plan, verify
    from packtrain.engine.ops import *  # noqa: F403
    from packtrain.engine.optim import LBFGS, SGD, AdamW, Muon
    from packtrain.engine.placement import Placed, place
    from packtrain.engine.tensor import (
        GraphError, Op, Spec, Tensor, constant, input, named, op, state, weight,
    )  # fmt: skip
    from packtrain.inference.kv_cache import CacheFull, Context, ContextError
    from packtrain.inference.sampling import Chain, Sampling
    from packtrain.training.generic import (
        Callbacks, Dataset, Fitted, Model, Result, Trainer, epoch, fit, load, save,
    )  # fmt: skip

    __all__ = [
        "LBFGS", "SGD", "AdamW", "CacheFull", "Callbacks", "Chain", "Context", "ContextError",
        "Dataset", "DoesNotFit", "Executor", "Fitted", "Graph",
        "GraphError", "InputError", "Model", "Muon", "Op", "Placed", "Plan", "PlanError", "Result",
        "RunError", "Sampling", "Session", "Spec", "Stopped", "Tensor", "Trainer", "__version__", "backends", "bf16",
        "chat", "choose", "compare", "constant", "debug", "differentiate", "dtypes", "embed", "epoch", "evaluate",
        "f16", "f32", "f64", "finetune", "fit", "generate", "i32", "i64", "input", "interpret", "least_order", "load",
        "make_plan", "merge", "named", "op", "ops", "options", "place", "plan", "quantize", "save", "start", "state",
        "train", "u8", "verify", "weight",
    ]  # fmt: skip

_LAZY_EXPORTS = {
    "api": (
        "chat", "choose", "compare", "embed", "evaluate", "finetune", "generate", "merge", "options", "plan",
        "quantize", "start", "train",
    ),
    "inference.kv_cache": ("CacheFull", "Context", "ContextError"),
    "training.generic": (
        "Callbacks", "Dataset", "Fitted", "Model", "Result", "Trainer", "epoch", "fit", "load", "save",
    ),
    "engine.optim": ("LBFGS", "SGD", "AdamW", "Muon"),
    "dtypes": ("bf16", "f16", "f32", "f64", "i32", "i64", "u8"),
    "engine.autodiff": ("differentiate",),
    "engine.graph": ("Graph",),
    "engine.interpreter": ("interpret",),
    "engine.placement": ("Placed", "place"),
    "engine.memory_plan": ("Plan", "PlanError", "least_order", "make_plan", "verify"),
    "engine.executor": ("Executor", "RunError", "Session", "Stopped"),
    "inference.sampling": ("Chain", "Sampling"),
    "engine.tensor": (
        "GraphError", "Op", "Spec", "Tensor", "constant", "input", "named", "op", "state", "weight",
    ),
}  # fmt: skip
_EAGER_EXPORTS = ("DoesNotFit", "InputError", "__version__", "backends", "debug", "dtypes", "ops")
_LAZY_FOLDERS = {"backends": "packtrain.engine.backends", "ops": "packtrain.engine.ops"}


def _public_names() -> list[str]:
    """Return all public names in ruff's order, followed by the names of the ops."""
    names = [*_EAGER_EXPORTS, *(name for group in _LAZY_EXPORTS.values() for name in group)]
    names.sort(key=lambda name: (not name.isupper(), name))
    return [*names, *importlib.import_module("packtrain.engine.ops").__all__]


def __dir__() -> list[str]:
    return _public_names()


def __getattr__(name: str) -> typing.Any:
    """Load a public name, or a module of packtrain, when it is first used."""
    if name == "__all__":
        return _public_names()
    home = next((module for module, names in _LAZY_EXPORTS.items() if name in names), None)
    if home is None and not name.startswith("_"):
        module_path = _LAZY_FOLDERS.get(name, f"packtrain.{name}")
        if importlib.util.find_spec(module_path):
            return importlib.import_module(module_path)
        home = "engine.ops"
    attribute = getattr(importlib.import_module(f"packtrain.{home}"), name, None) if home else None
    if attribute is None:
        raise AttributeError(f"module 'packtrain' has no attribute {name!r}")
    globals()[name] = attribute
    return attribute
