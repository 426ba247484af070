"""Writes docs/ops.md: facts of the registry on every op, and the worst errors of its checks; see benchmarks.check."""

import inspect
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile

from packtrain.cli.check import has_peer, worst_errors
from packtrain.devtools.check import check_cases
from packtrain.devtools.check.op_samples import FUNCTIONS, typed_samples
from packtrain.dtypes import READABLE, f32
from packtrain.engine import ops
from packtrain.engine.tensor import OPS

GGML = re.compile(r"\bggml_\w+")
CITATION = re.compile(r"(\bggml_\w+(, | and | to )?)+[.;,]?")
# of a docstring: neither an empty line, after which details follow, nor a row of a table of arguments
IS_SENTENCE = re.compile(r"\S(?!.*\S  +\S)").match
PAGE = """# Ops

Written by `python -m benchmarks.check --markdown docs/ops.md`, which checks them all: values on each backend
against the specification in float64, gradients against central differences in float64, and both against PyTorch in
float64. Errors are of the largest value, rounded up to a power of ten, as they were on the machine that wrote this.
A function is composed of ops, and its gradient follows from theirs. Shapes broadcast as in NumPy.

| op | what it is | in ggml | beside f32 | kernels | gradient | worst value | worst gradient | PyTorch |
|---|---|---|---|---|---|---|---|---|
"""


def ops_page(results: Sequence[check_cases.CheckResult]) -> str:
    """Return the text of docs/ops.md, one row per op."""
    by_op: dict[str, list[check_cases.CheckResult]] = {}
    for result in results:
        by_op.setdefault(result.op, []).append(result)
    return PAGE + "".join(
        f"| {' | '.join([*op_columns(name), *_errors(by_op[name])])} | {'yes' if has_peer(by_op[name]) else 'no'} |\n"
        for name in sorted(by_op)
    )


def op_columns(name: str) -> list[str]:
    """Return the columns of docs/ops.md that the registry knows for an op."""
    text = inspect.cleandoc(getattr(ops, name, OPS.get(name, FUNCTIONS.get(name))).__doc__ or "")
    paragraph = " ".join(takewhile(IS_SENTENCE, text.split("\n")))
    summary = re.sub(" +", " ", CITATION.sub("", paragraph)).strip().rstrip("., ;") + "."
    kernels = ", ".join(sorted(OPS[name].kernels)) if name in OPS else "of its ops"
    return [
        f"`{name}`" if name in OPS else f"`{name}` (function)", summary.replace("|", "\\|"),
        ", ".join(dict.fromkeys(GGML.findall(text))), "; ".join(_packed_types(name)), kernels or "none: a view",
        "yes" if check_cases.has_gradient(name) else "no",
    ]  # fmt: skip


def _packed_types(name: str) -> Iterator[str]:
    """Yield each input's element types other than f32: `w: q8_0, q4_K`."""
    types_by_leaf: dict[str, list[str]] = {}
    for variant in typed_samples(name) if name in OPS else ():
        types_by_leaf.setdefault(variant.packed_name, []).append(str(variant.dtype))
    all_types = [str(t) for t in READABLE if t != f32]
    for leaf, types in types_by_leaf.items():
        yield f"{leaf}: {'every type' if types == all_types else ', '.join(types)}"


def _errors(results: Sequence[check_cases.CheckResult]) -> list[str]:
    worst = worst_errors(results)
    slope_errors = [worst[c] for c in (check_cases.SLOPE, check_cases.PEER) if c in worst]
    errors = worst.get(check_cases.VALUE), max(slope_errors, default=None)
    return ["" if e is None else _power(e) for e in errors]


def _power(error: float) -> str:
    """Return the next power of ten above an error: 3e-7 is 1e-6."""
    return "0" if error == 0 else f"1e{int(f'{error:.0e}'.partition('e')[2]) + 1}"
