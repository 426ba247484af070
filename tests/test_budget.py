"""What is kept, chosen within a number of bytes: choices against exhaustive search, budgets, refusals."""

import itertools
import json
import re
import subprocess
import sys
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from benchmarks.watched import private_nbytes_of
from packtrain.cli.main import main
from packtrain.common.errors import InputError
from packtrain.common.memory import parse_size, private_nbytes, total_nbytes
from packtrain.engine.backends import HOST
from packtrain.engine.optim import SGD, AdamW
from packtrain.models import transformer
from packtrain.models.config import Config
from packtrain.planner import budget as budgets
from packtrain.planner import kernel_memory
from packtrain.planner.budget import plan_within_limits
from packtrain.planner.checkpointing import (
    RecomputeChoice,
    checkpoint_spacing,
    spaced_choice,
    uniform_choice,
)
from packtrain.planner.checkpointing.saved_values import inner_values, split_calls
from packtrain.planner.cost_model import BackendRates
from packtrain.planner.drafts import chain
from packtrain.planner.plan_request import PlanRequest
from packtrain.planner.plan_search import PlanSearch, find_fastest_shape, smallest
from packtrain.planner.step_shape import StepShape
from packtrain.planner.training_plans import APPLY, MEASURE, make_plans
from packtrain.training.monitoring import metrics_file
from packtrain.training.training_engine import TrainingEngine
from tests.kill import TINY_FLAGS, sample_text
from tests.models import CONFIG, same_bits, seeded_batch, seeded_weights
from tests.search_checks import smallest_planned

RATES = BackendRates(1e11, 1e10)
MIB = 1 << 20
ADAMW = AdamW()
ROWS, TIME = 4, 16


def deep_shape(blocks: int, rows: int = ROWS, **options) -> StepShape:
    return StepShape(replace(CONFIG, block_count=blocks), rows, TIME, **options)


def make_request(baseline: int = 0) -> PlanRequest:
    return PlanRequest(AdamW(), RATES, baseline)


def train_weights(shape: StepShape, steps: int = 3, optimizer=ADAMW) -> dict[str, np.ndarray]:
    engine = TrainingEngine(make_plans(shape, optimizer), optimizer)
    engine.session.set(seeded_weights(shape.config))
    results, rows = {}, shape.micro_batch_size
    for number in range(1, steps + 1):
        full_batch = seeded_batch(shape.config, ROWS, TIME, number) | {
            "weights": np.ones((ROWS, TIME), np.float32)
        }
        parts = range(0, ROWS, rows)
        micros = [{name: x[at : at + rows] for name, x in full_batch.items()} for at in parts]
        outcome = engine.step(micros, number, 1e-2)
        results |= {f"{number} loss": outcome.loss, f"{number} norm": outcome.norm}
    return results | {name: engine.session.get(name) for name in engine.plans.leaves}


def test_two_passes_and_any_choice_give_the_same_bits():
    shape = deep_shape(4, max_norm=0.1)
    expected = train_weights(shape)
    for other in (
        replace(shape, two_passes=True),
        replace(shape, keep=uniform_choice(4, ()), two_passes=True),
        *(replace(shape, num_two_pass_blocks=count) for count in (1, 3, 4)),
        *(
            replace(shape, keep=spaced_choice(4, 2), num_two_pass_blocks=count)
            for count in (1, 3, 4)
        ),
        replace(shape, keep=smallest_planned(chain(shape, make_request())).choice),
        replace(shape, keep=spaced_choice(4, 2)),
    ):
        assert same_bits(train_weights(other), expected)
    assert set(make_plans(replace(shape, two_passes=True), AdamW()).plans) >= {MEASURE, APPLY}


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_micro_batches_that_go_through_each_block_in_turn_give_their_sum(max_norm):
    """The same gradients but for the order of additions; where that is the same, the same bits."""
    config = replace(CONFIG, block_count=3, tied=False)
    summed = StepShape(config, 1, TIME, ROWS, max_norm)
    layered = replace(summed, layered=True)
    expected, got = (train_weights(step_shape, 1, SGD()) for step_shape in (summed, layered))
    for name, value in expected.items():
        if not name.startswith("g/"):
            error = np.abs(got[name] - value).max() / np.abs(value).max()
            assert error < 1e-6, f"{name}: {error}"
    if max_norm is None:
        exact = [name for name in got if name.startswith("blk.") and got[name].ndim == 2]
        assert exact and same_bits({n: got[n] for n in exact}, {n: expected[n] for n in exact})
    for keep in (uniform_choice(3, ()), smallest_planned(chain(layered, make_request())).choice):
        assert same_bits(train_weights(replace(layered, keep=keep), 1, SGD()), got)
    if max_norm is not None:
        assert same_bits(train_weights(replace(layered, two_passes=True), 1, SGD()), got)
        for count in range(1, 4):
            assert same_bits(
                train_weights(replace(layered, num_two_pass_blocks=count), 1, SGD()), got
            )


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_blocks_in_tiles_train_as_whole_blocks_do(max_norm):
    """The same updates but for the order of additions; recomputation and two passes change no bit."""
    untiled = deep_shape(3, max_norm=max_norm)
    tiled = replace(untiled, num_row_tiles=2)
    expected, got = (train_weights(step_shape, 1, SGD()) for step_shape in (untiled, tiled))
    for name, value in expected.items():
        error = np.abs(got[name] - value).max() / np.abs(value).max()
        assert error < 1e-6, f"{name}: {error}"
    changed = {"two_passes": True} if max_norm else {}
    for keep in (uniform_choice(3, ()), spaced_choice(3, 2)):
        assert same_bits(train_weights(replace(tiled, keep=keep, **changed), 1, SGD()), got)


def test_micro_batches_in_turn_need_less_than_sums_or_than_all_rows_at_once():
    """So a search finds them, where matrices are large and tokens more than they are wide."""
    config = Config(320, 512, 512, 4, 2048, 8, 8)
    summed = StepShape(config, 1, 512, 4)
    layered = replace(summed, layered=True, keep=uniform_choice(4, ()))
    together = replace(summed, micro_batch_size=4, num_micro_batches=1, keep=uniform_choice(4, ()))
    min_nbytes = make_plans(layered, AdamW()).nbytes
    assert min_nbytes < make_plans(replace(summed, keep=uniform_choice(4, ())), AdamW()).nbytes
    assert min_nbytes < make_plans(together, AdamW()).nbytes
    limit = make_request().peak_nbytes(make_plans(layered, AdamW()))
    answer = find_fastest_shape(summed, make_request().with_limit(limit))
    assert answer.is_within_limits and answer.shape.layered and answer.shape.num_micro_batches == 4


def test_the_smallest_arena_is_nested_and_gives_the_same_bits():
    shape, blocks = deep_shape(8), chain(deep_shape(8), make_request())
    blocks.call_nbytes = 0  # which is more than these small tensors are worth
    small = smallest_planned(blocks).choice
    assert max(small.stream) > 1
    assert same_bits(train_weights(replace(shape, keep=small), 1), train_weights(shape, 1))


def test_two_passes_need_no_memory_for_waiting_gradients():
    shape = deep_shape(4, max_norm=0.1, keep=uniform_choice(4, ()))
    gradient_nbytes = sum(leaf.spec.nbytes for leaf in transformer.weights(shape.config).values())
    one_pass_nbytes = make_plans(shape, AdamW()).arena_nbytes
    two_pass_nbytes = make_plans(replace(shape, two_passes=True), AdamW()).arena_nbytes
    assert one_pass_nbytes - two_pass_nbytes > gradient_nbytes / 3


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_more_memory_is_never_slower_and_every_plan_fits(max_norm):
    blocks = chain(deep_shape(6, max_norm=max_norm), make_request())
    blocks.call_nbytes = 0  # which is more than these small tensors are worth
    everything = blocks.plan_choice(uniform_choice(6, range(len(blocks.block.value_nbytes))))
    smallest_plan = smallest_planned(blocks)
    budgets = np.linspace(smallest_plan.nbytes, everything.nbytes, 12).astype(int)
    plans = [blocks.fastest_within(int(budget)) for budget in budgets]
    assert all(
        f is not None and f.nbytes <= budget for f, budget in zip(plans, budgets, strict=True)
    )
    seconds = [f.seconds for f in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == everything.seconds < seconds[0] / 10  # the lookup of embeddings
    assert blocks.fastest_within(smallest_plan.nbytes - 4096) is None


def test_two_blocks_are_as_good_as_exhaustive_search():
    shape = StepShape(replace(CONFIG, block_count=2), ROWS, TIME)
    blocks = chain(shape, make_request())
    blocks.call_nbytes = 0
    sides = blocks.block.strategies[::2]
    every = [
        blocks.plan_choice(RecomputeChoice((0, rank, 0), (a, b)))
        for a, b in itertools.product(sides, sides)
        for rank in (0, 1)
        if rank == 0 or a == ()
    ]
    low, high = min(f.nbytes for f in every), max(f.nbytes for f in every)
    for budget in np.linspace(low, high, 8).astype(int):
        fresh = chain(shape, make_request())
        fresh.call_nbytes = 0
        got = fresh.fastest_within(int(budget))
        best = min(f.seconds for f in every if f.nbytes <= budget)
        if got is None:
            got = smallest_planned(fresh)
        assert got.nbytes <= budget * 1.01
        total_seconds = 3 * 2 * blocks.block.forward_seconds
        assert got.seconds - best <= 0.01 * total_seconds


def test_the_spacing_of_sqrt():
    blocks = chain(deep_shape(6), make_request())
    values = inner_values(split_calls(blocks.build(3, None).stream)[2])
    inside = sum(-(-t.spec.nbytes // 64) * 64 for t in values)
    assert checkpoint_spacing(blocks) == max(
        round((6 * blocks.block.stream_nbytes / inside) ** 0.5), 1
    )


# ---- the search


def test_what_fits_as_it_is_stays_as_it_is():
    shape = deep_shape(3, max_norm=1.0)
    assert find_fastest_shape(shape, make_request().with_limit(1 << 40)).shape == shape


def test_less_memory_down_to_the_least_which_fits_and_no_less():
    shape, process = deep_shape(3, max_norm=1.0), make_request()
    max_nbytes = process.peak_nbytes(make_plans(shape, AdamW()))
    refused = find_fastest_shape(shape, process.with_limit(MIB))
    assert not refused.is_within_limits
    min_nbytes = process.peak_nbytes(process.make_plans(refused.shape))
    assert min_nbytes < max_nbytes
    for limit in np.linspace(min_nbytes, max_nbytes, 6).astype(int):
        answer = find_fastest_shape(shape, process.with_limit(int(limit)))
        assert (
            answer.is_within_limits
            and process.peak_nbytes(process.make_plans(answer.shape)) <= limit
        )
        assert answer.shape.micro_batch_size * answer.shape.num_micro_batches == ROWS
    assert not find_fastest_shape(
        shape, process.with_limit(int(min_nbytes * 0.97))
    ).is_within_limits


def test_a_loss_head_that_is_too_large_for_validation_is_cut_before_blocks_are():
    """Validation has a loss head, too, without blocks that could be computed again."""
    config = Config(32_000, 64, 64, 4, 128, 4, 4)
    shape, searcher = StepShape(config, 4, 64, evaluate=True), PlanSearch(make_request())
    chunked_draft = searcher.draft(replace(shape, chunk=64))
    fastest_draft = searcher.fastest_draft(shape, chunked_draft.nbytes, fixed=False)
    assert (
        searcher.estimate(shape).other_arena_nbytes
        > 2 * searcher.estimate(chunked_draft.shape).other_arena_nbytes
    )
    assert fastest_draft is not None and fastest_draft.seconds <= chunked_draft.seconds


def test_the_child_finds_the_same():
    shape = deep_shape(2)
    result = plan_within_limits(shape, make_request().with_limit(1 << 40))
    assert result.shape == shape and result.baseline_nbytes > 10 * MIB and result.refusal is None


def test_more_budget_is_never_slower():
    """Every budget is asked by itself, with nothing remembered; tensors are large enough to matter beside calls."""
    config = Config(320, 128, 256, 3, 768, 8, 8)
    shape, process = StepShape(config, 2, 128), make_request()
    max_nbytes = process.peak_nbytes(make_plans(shape, AdamW()))
    min_nbytes = process.peak_nbytes(process.make_plans(smallest(shape, process)))
    seconds = []
    for limit in np.linspace(min_nbytes, max_nbytes, 20).astype(int):
        answer = find_fastest_shape(shape, process.with_limit(int(limit)))
        plans = process.make_plans(answer.shape)
        assert answer.is_within_limits and process.peak_nbytes(plans) <= limit
        seconds.append(plans.step_seconds(RATES))
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]


def test_budgets_side_by_side_find_about_the_same():
    """With a norm and many blocks choices are far apart in bytes, and estimates meet the same ones again."""
    shape = StepShape(Config(320, 128, 256, 12, 768, 8, 8), 1, 128, max_norm=1.0)
    process, seconds = make_request(), []
    for limit in (132.1, 132.35, 132.6, 132.85, 134.78, 135.1):
        answer = find_fastest_shape(shape, process.with_limit(int(limit * MIB)))
        seconds.append(process.make_plans(answer.shape).step_seconds(RATES))
        assert (
            answer.is_within_limits
            and answer.shape.num_two_pass_blocks
            and not answer.shape.two_passes
        )
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]


def test_a_process_that_grows_with_each_search_is_met_by_the_second(monkeypatch):
    """What it takes beyond its estimate grows by half a MiB each time."""
    requested_limits, measured_totals, max_nbytes = [], [], 100 * MIB

    def ask(lazy_kernels, find, shape, request):
        assert find is find_fastest_shape, "the smallest was asked for"
        requested_limits.append(request.limits["host"])
        return SimpleNamespace(shape=shape, is_within_limits=True, suggested_change="")

    def planned_here(*_):
        grown = budgets.ASIDE_NBYTES + MIB + 75_000 + MIB // 2 * (len(requested_limits) - 1)
        measured_totals.append(requested_limits[-1] + grown)
        return SimpleNamespace(total_nbytes=measured_totals[-1] - budgets.KERNEL_MARGIN_NBYTES)

    monkeypatch.setattr(budgets, "_place_search", lambda *_: (ask, 0))
    monkeypatch.setattr(budgets, "plan_in_process", planned_here)
    budgets.search_plans(deep_shape(1), make_request().with_limit(max_nbytes), lambda _: None)
    assert (
        len(measured_totals) == 2
        and measured_totals[0] > max_nbytes >= measured_totals[1] > max_nbytes - 2 * MIB
    )


def test_a_search_runs_in_a_child_only_where_both_processes_fit(monkeypatch):
    shape, request = deep_shape(2), make_request()
    child_nbytes = budgets.search_child_nbytes(shape, request)
    monkeypatch.setattr(budgets, "private_nbytes", lambda: 40 * MIB)
    for spare_nbytes, runs_in_child in ((0, True), (-1, False)):
        limited_request = request.with_limit(40 * MIB + child_nbytes + spare_nbytes)
        run_search, nbytes = budgets._place_search(shape, limited_request)
        assert (run_search is budgets.run_in_child) == runs_in_child
        assert nbytes == child_nbytes - (0 if runs_in_child else budgets.CHILD_NBYTES)
    assert budgets._place_search(shape, request)[0] is budgets.run_in_child  # without a limit


# ---- the command


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(sample_text())
    return path


def arguments(data, tmp_path, *extra_flags):
    return [
        "train",
        "--data",
        str(data),
        "-o",
        str(tmp_path / "m.gguf"),
        *TINY_FLAGS,
        "--iters",
        "3",
        *extra_flags,
    ]


WIDE = ("--dim", "256", "--ffn", "768", "--batch-size", "8", "-c", "64", "--layers", "3")


def test_a_refusal_is_one_screen_and_its_minimum_runs(data, tmp_path):
    """In processes of their own: what this one holds is not the same twice."""
    run = [sys.executable, "-m", "packtrain", *arguments(data, tmp_path, *WIDE, "--memory")]
    refused = subprocess.run([*run, "20MiB"], capture_output=True, text=True, check=False)
    assert refused.returncode == 3
    screen = refused.stderr[refused.stderr.index("packtrain: error:") :].splitlines()
    assert 12 <= len(screen) <= 30 and "fit into 20.0 MiB" in screen[0]
    assert not (tmp_path / "m.run").exists()
    min_memory = screen[0].partition("would do is about ")[2].partition(",")[0]
    limit = parse_size(min_memory, "")
    completed = subprocess.run([*run, min_memory], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    end = metrics_file.read(tmp_path / "m.run/metrics.jsonl")[-1]
    plan = json.loads((tmp_path / "m.run/plan.json").read_text())
    assert plan["budget_bytes"] == limit and plan["fits"]
    assert 0.9 * limit <= end["peak_bytes"] <= limit and end["planned_bytes"] <= limit


def test_the_search_needs_less_than_what_it_plans_for(data, tmp_path):
    """A budget a little above a small run is taken, and all processes together stay within it from the first moment."""
    cli_args = arguments(data, tmp_path, *WIDE)  # the searching child takes more than smaller runs
    run = [sys.executable, "-m", "packtrain", *cli_args, "--no-tensorboard"]
    assert subprocess.run(run, capture_output=True, check=False).returncode == 0
    total = json.loads((tmp_path / "m.run/plan.json").read_text())["total_bytes"]
    limit = f"{total // MIB + 12}MiB"
    run += ["--overwrite", "--memory", limit]
    assert total - 8 * MIB < peak_of_all_processes(run) <= parse_size(limit, "")


def peak_of_all_processes(command: list[str]) -> int:
    """Private memory of a command that succeeds and of its children together."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, private_nbytes_of(process.pid))
        time.sleep(0.005)
    assert process.returncode == 0
    return peak


@pytest.mark.torch
def test_a_search_for_pytorch_stays_within_the_limit_too(data, tmp_path):
    """Its child would load PyTorch once more: it is counted, and where it does not fit, this process searches."""
    flags = [*WIDE[:4], "--batch-size", "128", "-c", "64", "--device", "torch:cpu"]
    run = [sys.executable, "-m", "packtrain", "plan", *arguments(data, tmp_path, *flags)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    total = int(float(re.search(r"^  total +([0-9.]+) MiB", done.stdout, re.MULTILINE)[1])) * MIB
    for limit in (total - 16 * MIB, total + 256 * MIB):
        assert 200 * MIB < peak_of_all_processes([*run, "--memory", f"{limit // MIB}MiB"]) <= limit


def test_a_model_that_takes_less_than_its_search_runs_without_one(data, tmp_path):
    run = [sys.executable, "-m", "packtrain", *arguments(data, tmp_path, "--no-tensorboard")]
    assert subprocess.run(run, capture_output=True, check=False).returncode == 0
    total = json.loads((tmp_path / "m.run/plan.json").read_text())["total_bytes"]
    run += ["--overwrite", "--memory", f"{total // MIB + 4}MiB"]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "planning a run that fits" not in done.stderr


def test_every_memory_of_this_process_counts(data, tmp_path):
    plans = {device: tmp_path / f"{device}.json" for device in ("cpu", "cpu:1")}
    for device, path in plans.items():
        flags = ["--device", device, "--json", str(path)]
        assert main(["plan", *arguments(data, tmp_path, *WIDE, *flags)]) == 0
    host_plan, device_plan = (json.loads(path.read_text()) for path in plans.values())
    assert device_plan["spaces"]["cpu:1"]["bytes"] > 8 * MIB
    assert abs(device_plan["total_bytes"] - host_plan["total_bytes"]) < 8 * MIB


def test_the_table_of_a_refusal_adds_up_to_its_minimum(data, tmp_path, capsys):
    assert main(arguments(data, tmp_path, "--memory", "20MiB")) == 3
    said = capsys.readouterr().err
    min_nbytes = parse_size(said.partition("would do is about ")[2].partition(",")[0], "")
    rows = re.findall(r"^  (\w+) +([0-9.]+) ([KM])iB", said, re.MULTILINE)
    sizes = {name: float(n) * {"K": 1 << 10, "M": MIB}[unit] for name, n, unit in rows}
    total = sizes.pop("total")
    assert total == min_nbytes and abs(sum(sizes.values()) - total) < MIB / 2
    assert {"weights", "arena", "process", "planning", "spare"} <= sizes.keys()


def test_a_refused_plan_is_drawn_all_the_same(data, tmp_path, capsys):
    files = {kind: tmp_path / f"plan.{kind}" for kind in ("json", "html")}
    drawn = [part for kind, path in files.items() for part in (f"--{kind}", str(path))]
    flags = ["--dim", "256", "--ffn", "768", "--batch-size", "8", "--memory", "20MiB", *drawn]
    assert main(["plan", *arguments(data, tmp_path, *flags)]) == 3
    plan_json = json.loads(files["json"].read_text())
    assert not plan_json["fits"] and plan_json["budget_bytes"] == 20 * MIB
    said = capsys.readouterr().err
    assert all(f"wrote {path}\n" in said for path in files.values())
    assert f"would do is about {-(-plan_json['minimum_bytes'] // MIB)}MiB" in said
    assert "budget" in files["html"].read_text()


def test_a_plan_that_fits_tells_the_smallest_too(data, tmp_path):
    path = tmp_path / "plan.json"
    flags = ["--dim", "256", "--ffn", "768", "--batch-size", "2", "--json", str(path)]
    assert main(["plan", *arguments(data, tmp_path, *flags)]) == 0
    plan_json = json.loads(path.read_text())
    assert plan_json["fits"] and plan_json["budget_bytes"] is None
    assert plan_json["baseline_bytes"] + plan_json["weights_bytes"] < plan_json["minimum_bytes"]


@pytest.mark.parametrize(
    "text", ["0MiB", "-1GiB", "lots", "12", "3XB", "101%", "0%", "1e9GiB", "2000000TiB", ""]
)
def test_impossible_sizes(data, tmp_path, capsys, text):
    assert main(arguments(data, tmp_path, f"--memory={text}")) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("packtrain: error: --memory")


def test_sizes():
    assert parse_size("1.5GiB", "") == 3 << 29
    assert parse_size("800 mib", "") == 800 << 20 == parse_size("800M", "")
    assert parse_size("2GB", "") == 2 * 10**9
    assert parse_size("50%", "") == total_nbytes() // 2
    with pytest.raises(InputError):
        parse_size("1KiB", "")


# ---- kernels that are not loaded yet


def test_what_kernels_take_is_measured_once_and_guessed_without_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_memory, "_cache_path", lambda names: tmp_path / "loaded.json")
    guess = kernel_memory.measure_kernels(("norm",), 10 * MIB)
    assert not list(tmp_path.iterdir())
    measured = kernel_memory.measure_kernels(("norm",), -1)  # a refusal, whose minimum is right
    assert list(tmp_path.iterdir()) and MIB < measured.nbytes < guess.nbytes
    monkeypatch.setattr(kernel_memory, "run_in_child", None)
    monkeypatch.setattr(kernel_memory, "write_error", lambda root: "read-only")
    assert kernel_memory.measure_kernels(("norm",), 10 * MIB) == measured


def test_a_guess_that_is_too_high_refuses_nothing_that_fits():
    """Kernels are loaded before anything is refused; here they take nothing of the 80 MiB that were expected."""
    guess = kernel_memory.KernelMemory(80 * MIB)
    base_request = make_request(private_nbytes() + guess.nbytes)
    min_nbytes = base_request.peak_nbytes(
        base_request.make_plans(smallest(deep_shape(2), base_request))
    )
    outcomes = [
        plan_within_limits(
            deep_shape(2),
            replace(base_request, kernels=guess).with_limit(min_nbytes - missing_mib * MIB),
        )
        for missing_mib in (12, 24, 100)
    ]
    assert [outcome.refusal is None for outcome in outcomes] == [True, True, False]


class Heavier(kernel_memory.KernelMemory):
    """Kernels that take 24 MiB more than was measured."""

    memory: ClassVar[list[int]] = []

    def load(self) -> None:
        self.memory.append(self.memory[-1] + 24 * MIB)


def test_kernels_that_take_more_than_expected_make_the_plan_smaller(monkeypatch):
    """The memory of the process is counted here: what it really is, other tests decide."""
    Heavier.memory[:] = [100 * MIB]
    monkeypatch.setattr("packtrain.planner.budget.private_nbytes", lambda: Heavier.memory[-1])
    base_request, shape = replace(make_request(100 * MIB), kernels=Heavier(0)), deep_shape(4, 1024)
    limit = base_request.peak_nbytes(base_request.make_plans(shape)) + 4 * MIB
    expected = plan_within_limits(
        shape, replace(base_request.with_limit(limit), kernels=kernel_memory.KernelMemory(0))
    )
    assert expected.refusal is None and expected.shape == shape
    replanned = plan_within_limits(shape, base_request.with_limit(limit))
    assert replanned.refusal is None and replanned.total_nbytes <= limit
    assert replanned.baseline_nbytes == 124 * MIB and replanned.shape != shape


class Lighter(kernel_memory.KernelMemory):
    """Kernels that use 3 MiB of this process again, which were counted as memory to come."""

    memory: ClassVar[list[int]] = []

    def load(self) -> None:
        self.memory.append(self.memory[0] - 3 * MIB)


@pytest.mark.parametrize(("below", "fits"), [(2, True), (6, False)])
def test_a_budget_is_refused_only_with_the_memory_that_loaded_kernels_take(
    monkeypatch, below, fits
):
    """So that a refusal's smallest budget is that of a process which has them."""
    Lighter.memory[:] = [100 * MIB]
    monkeypatch.setattr(budgets, "private_nbytes", lambda: Lighter.memory[-1])
    monkeypatch.setattr(budgets, "search_child_nbytes", lambda *_: 0)  # more than so small a run
    base_request = replace(make_request(100 * MIB), kernels=Lighter(0))
    limit = (
        base_request.peak_nbytes(base_request.make_plans(smallest(deep_shape(2), base_request)))
        - below * MIB
    )
    outcome = plan_within_limits(deep_shape(2), base_request.with_limit(limit))
    assert (outcome.refusal is None) == fits and len(Lighter.memory) == 2
    assert outcome.baseline_nbytes == 97 * MIB


class Large:
    """Stands in for plans: too large for any limit."""

    total_nbytes = 1 << 40


def test_plans_of_one_round_are_gone_before_the_next_ones_are_made(monkeypatch):
    """A process that keeps them grows by megabytes with each round, and refuses a budget that it said would do."""
    plan_refs = list[weakref.ref]()

    def planned_here(*_):
        assert all(ref() is None for ref in plan_refs)
        plans = Large()
        plan_refs.append(weakref.ref(plans))
        return plans

    monkeypatch.setattr(budgets, "plan_in_process", planned_here)
    answer = SimpleNamespace(shape=None, is_within_limits=True)
    monkeypatch.setattr(budgets, "_place_search", lambda *_: (lambda *_: answer, 0))
    limited_request = replace(make_request(), limits={HOST: MIB})
    budgets.search_plans(deep_shape(1), limited_request, lambda _: None)
    assert len(plan_refs) == budgets.MAX_SEARCHES + 1
