"""Activations that wait for the backward pass in the memory of the process: --offload, and `Graph.away`."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packtrain as pt
from packtrain import Graph, differentiate, make_plan, place
from packtrain.cli.main import main
from packtrain.engine.backends import Backend, Target, backend, cpu
from packtrain.engine.memory_plan import verify
from packtrain.engine.optim import AdamW
from packtrain.models import transformer
from packtrain.models.config import Config
from packtrain.planner.checkpointing import ALWAYS, MAYBE, NEVER
from packtrain.planner.cost_model import Rates
from packtrain.planner.plan_request import Request
from packtrain.planner.plan_search import Search, search
from packtrain.planner.plan_table import choices, put_away_nbytes
from packtrain.planner.step_shape import StepShape
from packtrain.planner.training_plans import make_plans
from tests.models import CONFIG, batch, bind, values
from tests.test_recompute import ROWS, TIME
from tests.test_spread import MIB, SIZES, folder, held, one_thread, refused, trained

__all__ = ["folder", "held", "one_thread"]
THERE = backend("cpu:1")
AWAY = Target((THERE,))


def gradients(seed: int | None, device: Backend) -> tuple[Any, dict[str, np.ndarray]]:
    """Loss and gradients of a llama; with a seed, random forward values wait elsewhere, and others are recomputed."""
    weights = transformer.weights(CONFIG)
    made = transformer.loss(CONFIG, weights, ROWS, TIME, chunk=16)
    forward = [t for call in Graph([made.loss]).calls for t in call.results]
    keep = None
    if seed is not None:
        ranks = np.random.RandomState(seed).choice([-1, -1, 0, 1, 2], len(forward))
        keep = {t: int(rank) for t, rank in zip(forward, ranks, strict=True)}
    found = differentiate(made.loss, list(weights.values()), keep)
    graph = Graph({"loss": made.loss} | {f"d/{w.name}": d for w, d in found.items()})
    graph.away = frozenset(t for t, rank in (keep or {}).items() if rank < 0)
    placed = place(graph, Target((device,)))
    verify(make_plan(placed), placed)
    return placed, bind(graph, values(CONFIG), backend=device)(batch(CONFIG, ROWS, TIME))


@pytest.mark.parametrize("seed", range(6))
def test_random_values_that_wait_elsewhere_change_no_bit(seed: int) -> None:
    _, alone = gradients(None, cpu)
    here, same = gradients(seed, cpu)
    there, moved = gradients(seed, THERE)
    assert not here.put_away and len(there.put_away) > 10
    for name, value in alone.items():
        assert same[name].tobytes() == moved[name].tobytes() == value.tobytes(), name


def test_each_value_goes_once_and_comes_back_once() -> None:
    """After the last forward call that reads it, and before the first other one; no later step reads it in between."""
    placed, _ = gradients(0, THERE)
    went = {
        s.reads[0]: i
        for i, s in enumerate(placed.steps)
        if s in placed.put_away and s.backend is cpu
    }
    back = [s.reads[0] for s in placed.put_away if s.backend is not cpu]
    homes = {placed.steps[i].results[0] for i in went.values()}
    assert went and len({*back}) == len(back) and {*back} == homes
    for t, at in went.items():
        assert all(t not in {x.base for x in s.reads} for s in placed.steps[at + 1 :]), t.label
        assert placed.steps[at - 1].call.phase == "forward"


@pytest.mark.parametrize(
    ("device", "recompute"),
    [
        *(("cpu:1", how) for how in ("auto", "none", "blocks", "sqrt")),
        pytest.param("torch:cpu:1", "none", marks=pytest.mark.torch),
    ],
)
def test_activations_that_wait_here_train_the_same(
    folder: Path, held: dict[str, int], device: str, recompute: str
) -> None:
    near, away = (
        trained(folder, device=device, offload=how, recompute=recompute, layers=8, max_grad_norm=0)
        for how in ("none", "activations")
    )
    assert list(away.losses) == list(near.losses)
    (at, left), (moved, there) = (
        (one.plan.plans.nbytes_in(device), one.plan.plans.nbytes_in("host")) for one in (near, away)
    )
    assert moved < at and there > left and held.get("cpu:1", 0) <= at
    assert "of activations wait in the memory of this process" in str(away.plan)
    assert "of activations wait" not in str(near.plan)


def test_a_refusal_names_the_least_with_activations_elsewhere(folder: Path) -> None:
    """It does, with the losses of a run that keeps all on the device; a MiB less does not."""
    device, most = {"device": "cpu:1"}, {"device_memory": "1MiB"}
    least, near = (
        re.search(r"would do is (\d+)MiB", refused(folder, **device, offload=how, **most))
        for how in ("all", "none")
    )
    assert least and near and int(least[1]) < int(near[1])
    done = trained(folder, **device, offload="all", device_memory=f"{least[1]}MiB")
    assert done.plan.plans.nbytes_in("cpu:1") <= int(least[1]) * MIB
    alone = list(trained(folder, **device).losses)
    assert list(done.losses) == pytest.approx(alone, rel=1e-5)
    refused(folder, **device, offload="all", device_memory=f"{int(least[1]) - 1}MiB")


def test_the_search_moves_what_is_slower_to_recompute() -> None:
    """By the rate of the link: over a fast one values are moved, over a slow one recomputed. All keep to the limit."""
    shape = StepShape(Config(300, 64, 64, 6, 192, 4, 4), 8, 64, evaluate=False, max_norm=1.0)
    whole, took = Request(AdamW(), Rates(1e10, 1e10), target=AWAY), []
    limit = Search(whole).rough(shape).nbytes * 2 // 3
    for link, offload in ((1e12, MAYBE), (1e5, MAYBE), (1e12, NEVER), (1e5, ALWAYS)):
        asked = replace(whole, rates=Rates(1e10, 1e10, link=link), offload=offload)
        answer = search(shape, asked.within(limit))
        plans = make_plans(answer.shape, AdamW(), target=AWAY)
        assert answer.fits and plans.nbytes_in("cpu:1") <= limit
        took.append((bool(put_away_nbytes(plans)), "recomputed" in ";".join(choices(plans))))
    (moved, _), (_, again), (never, _), (always, _) = took
    assert moved and always and again and not never and not took[1][0]


def test_plan_prints_what_waits_where(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    where = [f"--data={folder}/text.txt", f"-o={folder}/p.gguf", "--iters=3", "--threads=1"]
    about = ["--device=cpu:1", "--offload=activations", f"--json={folder}/p.json"]
    assert main(["plan", "train", *where, *flags, *about]) == 0
    shown = capsys.readouterr().out
    told = json.loads((folder / "p.json").read_text())
    nbytes = told["offloaded_bytes"]
    assert (
        f"{pt.engine.memory_plan.size_text(nbytes)} of activations wait in the memory of this process"
        in shown
    )
    assert nbytes > MIB and told["spaces"]["cpu:1"]["bytes"] > MIB
    assert re.search(r"in this process\n(  optimizer .*\n)?  arena", shown), shown
