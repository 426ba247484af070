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
from packtrain.planner.checkpointing import ALWAYS_OFFLOAD, MAY_OFFLOAD, NEVER_OFFLOAD
from packtrain.planner.cost_model import BackendRates
from packtrain.planner.plan_request import PlanRequest
from packtrain.planner.plan_search import PlanSearch, find_fastest_shape
from packtrain.planner.plan_table import choice_texts, offloaded_activation_nbytes
from packtrain.planner.step_shape import StepShape
from packtrain.planner.training_plans import make_plans
from tests.models import CONFIG, bind_graph, seeded_batch, seeded_weights
from tests.test_recompute import ROWS, TIME
from tests.test_spread import (
    MIB,
    SIZES,
    folder,
    one_thread,
    peak_nbytes,
    refusal_text,
    run_training,
)

__all__ = ["folder", "one_thread", "peak_nbytes"]
OTHER_BACKEND = backend("cpu:1")
OTHER_TARGET = Target((OTHER_BACKEND,))


def gradients(seed: int | None, device: Backend) -> tuple[Any, dict[str, np.ndarray]]:
    """Loss and gradients of a llama; with a seed, random forward values wait elsewhere, and others are recomputed."""
    weights = transformer.weights(CONFIG)
    loss_graph = transformer.loss(CONFIG, weights, ROWS, TIME, chunk=16)
    forward = [t for call in Graph([loss_graph.loss]).calls for t in call.results]
    keep = None
    if seed is not None:
        ranks = np.random.RandomState(seed).choice([-1, -1, 0, 1, 2], len(forward))
        keep = {t: int(rank) for t, rank in zip(forward, ranks, strict=True)}
    weight_gradients = differentiate(loss_graph.loss, list(weights.values()), keep)
    graph = Graph(
        {"loss": loss_graph.loss} | {f"d/{w.name}": d for w, d in weight_gradients.items()}
    )
    graph.offloaded = frozenset(t for t, rank in (keep or {}).items() if rank < 0)
    placed = place(graph, Target((device,)))
    verify(make_plan(placed), placed)
    return placed, bind_graph(graph, seeded_weights(CONFIG), backend=device)(
        seeded_batch(CONFIG, ROWS, TIME)
    )


@pytest.mark.parametrize("seed", range(6))
def test_random_values_that_wait_elsewhere_change_no_bit(seed: int) -> None:
    _, reference = gradients(None, cpu)
    resident_plan, resident_gradients = gradients(seed, cpu)
    offloaded_plan, offloaded_gradients = gradients(seed, OTHER_BACKEND)
    assert not resident_plan.offloads and len(offloaded_plan.offloads) > 10
    for name, value in reference.items():
        assert (
            resident_gradients[name].tobytes()
            == offloaded_gradients[name].tobytes()
            == value.tobytes()
        ), name


def test_each_value_goes_once_and_comes_back_once() -> None:
    """After the last forward call that reads it, and before the first other one; no later step reads it in between."""
    placed, _ = gradients(0, OTHER_BACKEND)
    copied_out = {
        s.reads[0]: i
        for i, s in enumerate(placed.steps)
        if s in placed.offloads and s.backend is cpu
    }
    copied_back = [s.reads[0] for s in placed.offloads if s.backend is not cpu]
    homes = {placed.steps[i].results[0] for i in copied_out.values()}
    assert copied_out and len({*copied_back}) == len(copied_back) and {*copied_back} == homes
    for t, at in copied_out.items():
        assert all(t not in {x.base for x in s.reads} for s in placed.steps[at + 1 :]), t.label
        assert placed.steps[at - 1].call.phase == "forward"


@pytest.mark.parametrize(
    ("device", "recompute"),
    [
        *(("cpu:1", mode) for mode in ("auto", "none", "blocks", "sqrt")),
        pytest.param("torch:cpu:1", "none", marks=pytest.mark.torch),
    ],
)
def test_activations_that_wait_here_train_the_same(
    folder: Path, peak_nbytes: dict[str, int], device: str, recompute: str
) -> None:
    resident_run, offloaded_run = (
        run_training(
            folder, device=device, offload=mode, recompute=recompute, layers=8, max_grad_norm=0
        )
        for mode in ("none", "activations")
    )
    assert list(offloaded_run.losses) == list(resident_run.losses)
    (device_nbytes, host_nbytes), (offloaded_device_nbytes, offloaded_host_nbytes) = (
        (training_run.plan.plans.nbytes_in(device), training_run.plan.plans.nbytes_in("host"))
        for training_run in (resident_run, offloaded_run)
    )
    assert (
        offloaded_device_nbytes < device_nbytes
        and offloaded_host_nbytes > host_nbytes
        and peak_nbytes.get("cpu:1", 0) <= device_nbytes
    )
    assert "of activations wait in the memory of this process" in str(offloaded_run.plan)
    assert "of activations wait" not in str(resident_run.plan)


def test_a_refusal_names_the_least_with_activations_elsewhere(folder: Path) -> None:
    """It does, with the losses of a run that keeps all on the device; a MiB less does not."""
    device, too_small = {"device": "cpu:1"}, {"device_memory": "1MiB"}
    offloaded_min, resident_min = (
        re.search(
            r"would do is (\d+)MiB", refusal_text(folder, **device, offload=mode, **too_small)
        )
        for mode in ("all", "none")
    )
    assert offloaded_min and resident_min and int(offloaded_min[1]) < int(resident_min[1])
    done = run_training(folder, **device, offload="all", device_memory=f"{offloaded_min[1]}MiB")
    assert done.plan.plans.nbytes_in("cpu:1") <= int(offloaded_min[1]) * MIB
    reference_losses = list(run_training(folder, **device).losses)
    assert list(done.losses) == pytest.approx(reference_losses, rel=1e-5)
    refusal_text(folder, **device, offload="all", device_memory=f"{int(offloaded_min[1]) - 1}MiB")


def test_the_search_moves_what_is_slower_to_recompute() -> None:
    """By the rate of the link: over a fast one values are moved, over a slow one recomputed. All keep to the limit."""
    shape = StepShape(Config(300, 64, 64, 6, 192, 4, 4), 8, 64, evaluate=False, max_norm=1.0)
    base_request, outcomes = PlanRequest(AdamW(), BackendRates(1e10, 1e10), target=OTHER_TARGET), []
    limit = PlanSearch(base_request).rough_draft(shape).nbytes * 2 // 3
    for link, offload in (
        (1e12, MAY_OFFLOAD),
        (1e5, MAY_OFFLOAD),
        (1e12, NEVER_OFFLOAD),
        (1e5, ALWAYS_OFFLOAD),
    ):
        linked_request = replace(
            base_request, rates=BackendRates(1e10, 1e10, link=link), offload_mode=offload
        )
        answer = find_fastest_shape(shape, linked_request.with_limit(limit))
        plans = make_plans(answer.shape, AdamW(), target=OTHER_TARGET)
        assert answer.is_within_limits and plans.nbytes_in("cpu:1") <= limit
        outcomes.append(
            (
                bool(offloaded_activation_nbytes(plans)),
                "recomputed" in ";".join(choice_texts(plans)),
            )
        )
    (is_offloaded, _), (_, is_recomputed), (is_never_moved, _), (is_always_moved, _) = outcomes
    assert (
        is_offloaded
        and is_always_moved
        and is_recomputed
        and not is_never_moved
        and not outcomes[1][0]
    )


def test_plan_prints_what_waits_where(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    file_flags = [f"--data={folder}/text.txt", f"-o={folder}/p.gguf", "--iters=3", "--threads=1"]
    device_flags = ["--device=cpu:1", "--offload=activations", f"--json={folder}/p.json"]
    assert main(["plan", "train", *file_flags, *flags, *device_flags]) == 0
    printed = capsys.readouterr().out
    plan_json = json.loads((folder / "p.json").read_text())
    nbytes = plan_json["offloaded_bytes"]
    assert (
        f"{pt.engine.memory_plan.size_text(nbytes)} of activations wait in the memory of this process"
        in printed
    )
    assert nbytes > MIB and plan_json["spaces"]["cpu:1"]["bytes"] > MIB
    assert re.search(r"in this process\n(  optimizer .*\n)?  arena", printed), printed
