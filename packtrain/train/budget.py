"""The promise of `--memory`: the fastest way to train that fits into so many bytes, or a refusal that helps.

In go a Shape as asked for, a limit, and what this machine can do; out come Plans. What was chosen changes no result
but for the order of additions, which is said. The search runs in a child, so that its memory is gone afterwards.
"""

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from packtrain.errors import DoesNotFit
from packtrain.memory import private_nbytes, settle
from packtrain.plan import size_text
from packtrain.train.plans import Plans, Shape
from packtrain.train.search import Answer, Setting

OWNERS = 10
SPARE_NBYTES = 1 << 20  # how much a process differs from the next one that does the same
ROUNDS = 3


def planned(
    shape: Shape, recompute: str, setting: Setting, limit: int, fixed: bool = False
) -> tuple[Plans, int]:
    """Plans within the limit, and the bytes of this process with them. Raises DoesNotFit with all that helps.

    fixed  nothing may be chosen that changes the order of additions: a run is resumed
    """
    for _ in range(ROUNDS):
        answer = in_child(shape, recompute, setting, limit, fixed)
        plans = setting.plans(answer.shape)
        settle()
        baseline = private_nbytes()
        over = baseline + plans.nbytes - limit
        if over <= 0:
            return plans, baseline
        if not answer.fits:
            raise DoesNotFit(refusal(plans, answer.change, baseline, limit))
        setting = replace(setting, baseline=setting.baseline + over + SPARE_NBYTES // 4)
    raise DoesNotFit(refusal(plans, "a little more would do", baseline, limit))


def in_child(shape: Shape, recompute: str, setting: Setting, limit: int, fixed: bool) -> Answer:
    """`search` in a short-lived process."""
    request = pickle.dumps((shape, recompute, setting, limit, fixed))
    paths = filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "packtrain.train"],
        input=request,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise RuntimeError(f"the search for a budget failed, exit {done.returncode}: {last[0]}")
    found = pickle.loads(done.stdout)
    assert isinstance(found, Answer)
    return found


# ---- refusal


def refusal(smallest: Plans, change: str, baseline: int, limit: int) -> str:
    """One screen: asked, the smallest that would do, who owns its peak, and the cheapest change that fits."""
    total = baseline + smallest.nbytes + SPARE_NBYTES
    lines = [
        f"this does not fit into {size_text(limit)}; the smallest --memory that would do is {mib(total)}",
        f"  {_described(smallest)}",
        *smallest.rows(baseline),
        f"  the peak of its arena, {size_text(smallest.arena_nbytes)}, belongs to",
    ]
    lines += [
        f"    {size_text(b.nbytes):>10}  {b.name}  ({b.op}, {b.category})"
        for b in smallest.largest.peak()[:OWNERS]
    ]
    return "\n".join([*lines, f"  {change}"])


def mib(nbytes: int) -> str:
    """A number of bytes as --memory takes it, rounded up."""
    return f"{-(-nbytes // (1 << 20))}MiB"


def _described(plans: Plans) -> str:
    shape = plans.shape
    choices = "".join(f"; {choice}" for choice in plans.choices)
    return f"that is with {shape.micros} × {shape.rows} × {shape.time} tokens a step{choices}"
