"""Several processes that train one model: the same losses as one, the same bits each time, and what ends them."""

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from packtrain import distributed
from packtrain.cli.main import main
from packtrain.distributed import BUCKET, exchange, rank_slice, world
from packtrain.engine import ops
from packtrain.engine.backends import CPU, Target
from packtrain.engine.backends.torch_backend import TorchDevice
from packtrain.engine.executor import Session
from packtrain.engine.optim import AdamW, accumulation_graph
from packtrain.engine.placement import place
from packtrain.engine.tensor import input, weight
from packtrain.gguf import GGUF
from packtrain.models.config import Config
from packtrain.planner import rank_exchange
from packtrain.planner.cost_model import BackendRates
from packtrain.planner.plan_table import table_lines
from packtrain.planner.step_shape import StepShape
from packtrain.planner.training_plans import make_plans
from packtrain.training import gradient_sums
from packtrain.training.checkpoints import load_checkpoint
from packtrain.training.monitoring import metrics_file
from packtrain.workflows import run_training
from tests import hosts
from tests.kill import RUN_KINDS, prepare_base, sample_text
from tests.ranked import (
    COMMON_FLAGS,
    assert_close_runs,
    assert_same_runs,
    by_hand,
    last_errors,
    run_checked,
    train_command,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks")
    (root / "text.txt").write_text(sample_text())
    return root


def about(folder: Path, name: str) -> dict[str, Any]:
    checkpoint = load_checkpoint(folder / f"{name}.run/checkpoint.gguf", print)
    assert checkpoint is not None
    return checkpoint.about


def test_numbers_are_exchanged_in_buckets_that_cover_all(monkeypatch):
    monkeypatch.setattr(exchange, "BUCKET", 7)
    arrays = [np.arange(n, dtype=np.float32) for n in (3, 1, 20, 4)]
    buckets = list(exchange.split_into_buckets(arrays))
    assert [sum(piece.size for piece in bucket) for bucket in buckets] == [7, 7, 7, 7]
    flat = np.concatenate([piece for bucket in buckets for piece in bucket])
    assert flat.tolist() == np.concatenate(arrays).tolist()
    assert all(any(np.shares_memory(p, a) for a in arrays) for bucket in buckets for p in bucket)


def test_without_torch_one_sentence_names_the_extra(folder, monkeypatch, capsys):
    monkeypatch.setattr(world, "find_spec", lambda name: None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(train_command(folder, "none")[3:]) == 2
    assert capsys.readouterr().err == (
        "packtrain: error: several processes need PyTorch: pip install packtrain[torch]\n"
    )


def test_a_process_alone_exchanges_nothing():
    single = distributed.current_world()
    assert (single.rank, single.world_size, single.gather(3), single.total(2.5)) == (0, 1, [3], 2.5)


@pytest.mark.torch
@pytest.mark.parametrize("zero", ["0", "1", "2"])
def test_ranks_that_exchange_whole_buckets_keep_to_their_plan(folder, zero):
    """Also without a limit: an exchange takes nothing that is not planned."""
    sizes = ["--dim", "256", "--layers", "2", "--ffn", "512", "--iters", "6"]
    run_checked(train_command(folder, f"wide{zero}", *sizes, "--nproc", "2", "--zero", zero))
    assert GGUF(folder / f"wide{zero}.gguf").array("blk.0.ffn_up.weight").size * 10 > BUCKET
    end = metrics_file.read(folder / f"wide{zero}.run/metrics.jsonl")[-1]
    assert end["event"] == "end" and end["peak_bytes"] <= end["planned_bytes"]


@pytest.mark.torch
def test_two_and_four_ranks_train_as_one_and_with_the_same_bits_each_time(folder):
    args = ["--iters", "200", "--steps-per-eval", "50", "--memory", "400MiB"]
    args += ["--grad-accumulation-steps", "2"]
    run_checked(train_command(folder, "one", *args))
    for name, extra_args in (("two", []), ("zero", ["--zero", "1"])):
        run_checked(train_command(folder, name, *args, "--nproc", "2", *extra_args))
        assert_close_runs(folder, "one", name, 200)
        end = metrics_file.read(folder / f"{name}.run/metrics.jsonl")[-1]
        assert end["event"] == "end" and end["peak_bytes"] <= end["planned_bytes"] <= 400 << 20
    assert_same_runs(folder, "two", "zero")  # a second run, and one that shares out the moments
    for name in ("scatter", "again"):  # and one that shares out the sums of gradients
        run_checked(train_command(folder, name, *args, "--nproc", "2", "--zero", "2"))
    assert_close_runs(folder, "one", "scatter", 200)
    assert_same_runs(folder, "scatter", "again")
    for name, extra_args in (("four", []), ("fours", ["--zero", "2"])):
        run_checked(train_command(folder, name, *args, "--nproc", "4", *extra_args))
        assert_close_runs(folder, "one", name, 200)


@pytest.mark.torch
@pytest.mark.skipif(not hosts.can_make_hosts(), reason="needs network namespaces")
def test_two_hosts_have_the_bits_of_two_processes_of_one(folder):
    """Network namespaces, each with an address of its own, and a link between them."""
    args = ["--iters", "20", "--steps-per-eval", "10", "--grad-accumulation-steps", "2"]
    with hosts.network_hosts(2) as two:
        started = by_hand(train_command(folder, "apart", *args), [], [], on=two)
        errors = [process.communicate(timeout=120)[1] for process in started]
        assert [process.returncode for process in started] == [0, 0], errors
    run_checked(train_command(folder, "beside", *args, "--nproc", "2"))
    assert_same_runs(folder, "apart", "beside")


@pytest.mark.torch
def test_ranks_on_pytorch_train_as_one(folder):
    """Also in a memory that the host does not look at, as a GPU's."""
    args = ["--iters", "50", "--steps-per-eval", "50", "--memory", "700MiB"]
    args += ["--grad-accumulation-steps", "2", "--device"]
    run_checked(train_command(folder, "torch", *args, "torch:cpu"))
    cases = ("torches", "torch:cpu", "0"), ("shares", "torch:cpu", "1"), ("far", "torch:cpu:1", "2")
    for name, device, zero in cases:
        run_checked(train_command(folder, name, *args, device, "--nproc", "2", "--zero", zero))
        assert_close_runs(folder, "torch", name, 50)
        end = metrics_file.read(folder / f"{name}.run/metrics.jsonl")[-1]
        assert end["event"] == "end" and end["peak_bytes"] <= end["planned_bytes"] <= 700 << 20
    assert_same_runs(
        folder, "torches", "shares"
    )  # a second run, and one that shares out the moments


@pytest.mark.torch
def test_a_model_over_two_memories_is_trained_by_two_ranks_as_by_one(folder):
    """Its first block on the cpu, its last on a device that the cpu plays; moments in the process's memory."""
    args = ["--iters", "50", "--steps-per-eval", "50", "--grad-accumulation-steps", "2"]
    args += ["--layers", "2", "--gpu-layers", "1", "--offload", "moments", "--device"]
    for number, (device, zero_stages) in enumerate({"cpu:1": "01", "torch:cpu:1": "2"}.items()):
        run_checked(train_command(folder, f"parted{number}", *args, device))
        for zero in zero_stages:
            name = f"parted{number}{zero}"
            run_checked(train_command(folder, name, *args, device, "--nproc", "2", "--zero", zero))
            assert_close_runs(folder, f"parted{number}", name, 50)
            plan = json.loads((folder / f"{name}.run/plan.json").read_text())
            assert {s for splits in plan["splits"] for s in splits} == {"host", device}
            assert load_checkpoint(folder / f"{name}.run/checkpoint.gguf", print).about["offloaded"]
    assert_same_runs(folder, "parted00", "parted01")


@pytest.mark.torch
def test_moments_that_are_shared_out_take_their_share_of_the_plan_and_are_saved_whole(folder):
    args = ["--iters", "4", "--grad-accumulation-steps", "2", "--lr-scheduler", "constant"]
    run_checked(train_command(folder, "all", *args, "--nproc", "2"))
    run_checked(train_command(folder, "half", *args, "--nproc", "2", "--zero", "1"))
    states = [
        json.loads((folder / f"{name}.run/plan.json").read_text())["state_bytes"]
        for name in ("all", "half")
    ]
    assert states[0] / 2 <= states[1] <= states[0] / 2 + 64 * 2 * len(moment_names(folder, "all"))
    for name, extra_args in (
        ("all", []),
        ("half", ["--zero", "1"]),
    ):  # with another number of ranks
        run_checked(
            train_command(folder, name, "--iters", "8", "--resume", "--nproc", "4", *extra_args)
        )
    assert_same_runs(folder, "all", "half")
    said = run_checked(train_command(folder, "half", "--iters", "9", "--resume", "--nproc", "1"))
    assert "the run had 4 processes and has 1 now" in said


@pytest.mark.torch
def test_sums_of_gradients_that_are_shared_out_have_the_same_bits_without_clipping(folder):
    args = [
        "--iters",
        "6",
        "--batch-size",
        "4",
        "--max-grad-norm",
        "0",
        "--lr-scheduler",
        "constant",
    ]
    for zero in ("1", "2"):
        run_checked(train_command(folder, f"parts{zero}", *args, "--nproc", "2", "--zero", zero))
    plans = [json.loads((folder / f"parts{zero}.run/plan.json").read_text()) for zero in ("1", "2")]
    full_nbytes, part_nbytes = (plan["gradient_bytes"] for plan in plans)
    assert (
        full_nbytes / 2 <= part_nbytes <= full_nbytes / 2 + 64 * len(moment_names(folder, "parts1"))
    )
    assert_same_runs(folder, "parts1", "parts2", norms=False)
    run_checked(
        train_command(
            folder, "parts2", *args, "--iters", "8", "--resume", "--nproc", "4", "--zero", "2"
        )
    )
    run_checked(train_command(folder, "parts1", *args, "--iters", "8", "--resume", "--nproc", "4"))
    assert_same_runs(folder, "parts1", "parts2", norms=False)


def moment_names(folder: Path, name: str) -> list[str]:
    return [entry for entry in GGUF(folder / f"{name}.run/checkpoint.gguf").entries if "/" in entry]


@pytest.mark.torch
def test_as_many_ranks_as_micro_batches_have_the_bits_of_one_process(folder):
    args = ["--iters", "20", "--grad-accumulation-steps", "2", "--memory", "400MiB"]
    run_checked(train_command(folder, "micro", *args))
    run_checked(train_command(folder, "micros", *args, "--nproc", "2"))
    assert not about(folder, "micro")["layered"]  # one process adds them one after the other, too
    assert_same_runs(folder, "micro", "micros")


@pytest.mark.torch
def test_an_adapter_is_tuned_by_two_ranks_as_by_one(folder):
    prepare_base(folder)
    flags = RUN_KINDS["finetune"].flags(folder)
    flags[flags.index("--batch-size") + 1] = "4"
    # at this rate the losses stay far from 0, near which f32 has no five digits of them
    args = ["--iters", "200", "--steps-per-eval", "50", "--lr", "1e-5", *COMMON_FLAGS]
    for name, extra_args in (("tuned", []), ("both", ["--nproc", "2"])):
        output = ["-o", str(folder / f"{name}.gguf")]
        run_checked([sys.executable, "-m", "packtrain", *flags, *output, *args, *extra_args])
    assert_close_runs(folder, "tuned", "both", 200)


@pytest.mark.torch
def test_a_run_goes_on_with_the_same_bits(folder):
    constant = ["--lr-scheduler", "constant", "--steps-per-eval", "5", "--warmup-ratio", "0"]
    run_checked(train_command(folder, "whole", *constant, "--iters", "10", "--nproc", "2"))
    run_checked(
        train_command(folder, "parts", *constant, "--iters", "5", "--nproc", "2", "--zero", "1")
    )
    run_checked(train_command(folder, "parts", "--iters", "10", "--resume"))
    assert_same_runs(folder, "whole", "parts")


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (
            ["--batch-size", "4", "--optimizer", "muon", "--zero", "1"],
            "muon needs all of a tensor for its update",
        ),
        (["--grad-accumulation-steps", "3"], "4 processes cannot share out the 6 rows of a step"),
        (["--link", "fast"], "--link fast: it must be a rate such as 10Gbit or 100Mbit"),
        (["--device", "cpu,cpu:1"], "--device cpu,cpu:1 works in one process; give cpu, torch:cpu"),
        (["--device", "numpy"], "--device numpy works in one process; give cpu, torch:cpu or cuda"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_by_one_sentence(folder, flags, sentence, capsys):
    planned = ["plan", "train", *train_command(folder, "refused", *flags)[4:], "--ranks", "4"]
    assert main(planned) == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "flags", [["--zero", "1"], ["--link", "1Gbit"]], ids=lambda flags: flags[0]
)
def test_what_is_for_several_processes_is_refused_in_one(folder, flags, capsys):
    assert main(["plan", "train", *train_command(folder, "refused", *flags)[4:]]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert flags[0] in said and "is for several processes; give --" in said


def test_a_plan_for_ranks_says_what_their_link_costs_and_what_their_share_of_moments_is(
    folder, capsys
):
    results = []
    for flags in (["--link", "1Gbit"], ["--link", "10Mbit"], ["--link", "10Mbit", "--zero", "1"]):
        planned = train_command(folder, "planned", "--batch-size", "4", "--ranks", "4", *flags)[4:]
        assert main(["plan", "train", *planned]) == 0
        said = capsys.readouterr().out
        (seconds,) = re.findall(r"each of 4 processes: (\S+) s a step", said)
        (speed,) = re.findall(r"together (\S+) tokens/s", said)
        assert float(speed.replace(",", "")) * float(seconds) == pytest.approx(4 * 32, rel=0.02)
        (nbytes,) = re.findall(r"optimizer +(\S+) KiB", said)
        results.append((float(seconds), float(nbytes)))
    (fast, full_size), (slow, second_size), (slowest, part) = results
    sent = 2 * 3 / 4 * 4 * 18_016 / (10e6 / 8)  # of 18,016 gradients, in seconds
    assert full_size == second_size and full_size / 4 <= part <= full_size / 4 + 2
    assert fast + 0.8 * sent < slow and slow + 0.4 * sent < slowest


def test_a_plan_for_ranks_says_what_sums_that_are_shared_out_cost(folder, capsys):
    """Half travels in the backward pass, half after the update: as much as with moments shared out."""
    results = {}
    for zero in ("0", "1", "2"):
        flags = ["--batch-size", "4", "--ranks", "4", "--link", "10Mbit", "--zero", zero]
        assert main(["plan", "train", *train_command(folder, "planned", *flags)[4:]]) == 0
        said = capsys.readouterr().out
        (seconds,) = re.findall(r"each of 4 processes: (\S+) s a step", said)
        (nbytes,) = re.findall(r"gradients +(\S+) KiB", said)
        results[zero] = float(seconds), float(nbytes)
    assert results["0"][1] == results["1"][1] and results["2"][1] < results["0"][1] / 3
    sent = 2 * 3 / 4 * 4 * 18_016 / (10e6 / 8)  # of 18,016 gradients, in seconds
    assert sent <= results["2"][0] < results["1"][0] and results["0"][0] < results["2"][0] + sent


def test_what_ranks_wait_for_each_other_is_no_rate_of_the_machine(monkeypatch):
    settings = SimpleNamespace(target=CPU)
    run = SimpleNamespace(seconds=1.0, job=SimpleNamespace(settings=settings))
    corrected = list[float]()
    monkeypatch.setattr(run_training, "correct_step_times", lambda by, target: corrected.append(by))
    for size, num_messages in ((2, 0), (1, 1)):
        monkeypatch.setattr(world, "_current_world", SimpleNamespace(world_size=size))
        timed = run_training.step_timer(run)
        messages = [timed(0.5, 1000) for _ in range(9)]
        assert sum(said is not None for said in messages) == len(corrected) == num_messages


@pytest.mark.torch
def test_rooms_for_sums_on_a_gpu_are_in_its_plan():
    """Beside those of a device whose ranks send from the host; no GPU is asked for anything."""
    shape = StepShape(Config(64, 16, 32, 2, 64, 2, 2), 2, 16)
    for count, extra_nbytes in ((1, 0), (2, 8 << 20)):
        for zero in (None, (0, count)):
            rank_shape = replace(shape, world_size=count, moment_share=zero)
            cuda_plans, far_plans = (
                make_plans(rank_shape, AdamW(), target=Target.for_backend(TorchDevice(name, "cpu")))
                for name in ("cuda", "far")
            )
            assert cuda_plans.nbytes_in("cuda") == far_plans.nbytes_in("far") + extra_nbytes
            assert bool(extra_nbytes) == (
                "exchange" in "\n".join(table_lines(replace(cuda_plans, baseline_nbytes=1)))
            )
            assert cuda_plans.nbytes == far_plans.nbytes


def test_latency_grows_with_ranks_as_the_exchange_sends():
    """Large parts travel to all at once, small ones around a ring; the bytes of a rank hardly grow."""
    rates, link = BackendRates(1e12, 1e18), 1e18  # bytes take no time

    def exchange_seconds(ranks: int, numbers: int = BUCKET) -> float:
        return rank_exchange.transfer_seconds(numbers, ranks, rates, link)

    assert exchange_seconds(2) == pytest.approx(2 * rank_exchange.LATENCY)
    step = exchange_seconds(3) - exchange_seconds(2)
    assert step == pytest.approx(2 * rank_exchange.MESSAGE)
    assert exchange_seconds(1024) - exchange_seconds(2) == pytest.approx(1022 * step)
    assert exchange_seconds(1024) < 2 * 1023 * rank_exchange.LATENCY / 4  # of a ring
    assert exchange_seconds(8, 3 * BUCKET) == pytest.approx(3 * exchange_seconds(8))
    rounds = [rank_exchange.round_seconds(ranks) for ranks in (2, 3, 1024)]
    assert rounds == pytest.approx([rank_exchange.LATENCY * n for n in (1, 2, 1023)])
    slow = [rank_exchange.transfer_seconds(BUCKET, ranks, rates, 1e6) for ranks in (2, 1024)]
    assert 1.9 < slow[1] / slow[0] < 2.1


def test_transfers_go_one_after_the_other_once_they_are_ready():
    assert rank_exchange.last_arrival_time([1, 2, 9], [3, 4, 1]) == 10
    assert rank_exchange.last_arrival_time([1, 2, 3], [3, 4, 1]) == 9
    assert rank_exchange.last_arrival_time([], []) == 0


def test_parts_of_arrays_cover_them_and_are_aligned():
    for count in (0, 1, 16, 17, 100, 1000, 4096):
        for size in (1, 2, 3, 8):
            runs = [rank_slice(count, rank, size) for rank in range(size)]
            assert [i for run in runs for i in range(run.start, run.stop)] == [*range(count)]
            assert all(run.start % 16 == 0 or run.start == count for run in runs)


def test_sums_leave_when_they_are_complete_while_the_backward_pass_goes_on(monkeypatch):
    monkeypatch.setattr(rank_exchange, "BUCKET", 1000)
    sent = list[tuple[int, list[str]]]()

    class TwoRankWorld(distributed.World):
        world_size = 2

        def start_all_reduce(self, arrays):
            sent.append((micro.at, [array.copy() for array in arrays]))

    monkeypatch.setattr(world, "_current_world", TwoRankWorld())
    w = [weight(f"w{i}", (40, 40)) for i in range(3)]
    h = input("x", (2, 40))
    for leaf in w:
        h = ops.matmul(h, leaf)
    graph = accumulation_graph({"loss": ops.sum(ops.mul(h, h))}, w)
    session = Session()
    micro = session.executor(place(graph))
    rng = np.random.default_rng(0)
    session.set({leaf.label: rng.standard_normal((40, 40), np.float32) for leaf in w})
    leaves = {leaf.label: leaf for leaf in w}
    plans = SimpleNamespace(
        leaves=leaves, trained_names=[*leaves], shape=SimpleNamespace(moment_share=None)
    )
    exchanged = gradient_sums.GradientExchange(session, plans, micro)
    exchanged.begin_step()
    micro({"x": np.ones((2, 40), np.float32), "fresh": np.ones(())}, stop=exchanged.make_sender())
    assert len(sent) >= 2 and all(at < len(micro.placed.steps) - 1 for at, _ in sent)
    exchanged.finish_step(np.zeros((), np.float32))
    assert len(sent) == 4
    for (_, (array,)), name in zip(sent, ("w2", "w1", "w0"), strict=False):
        assert np.array_equal(array, session.get(f"g/{name}"))  # it was complete when it left


@pytest.mark.torch
@pytest.mark.parametrize("setting, label", [("--lr", "--lr"), ("--data", "the data")])
def test_what_differs_between_ranks_is_found_before_step_1(folder, setting, label):
    (folder / "other.txt").write_text(sample_text()[:-200] + "A cat ate the moon. " * 10)
    value = {"--lr": "0.5", "--data": str(folder / "other.txt")}[setting]
    first, second = last_errors(by_hand(train_command(folder, "odd"), [], [setting, value]), 110)
    assert first == second and first.startswith(f"packtrain: error: rank 1 has {label} "), first
    assert not (folder / "odd.run").exists()


@pytest.mark.torch
def test_ctrl_c_stops_all_ranks_after_saving(folder):
    command = train_command(
        folder, "stopped", "--iters", "100000", "--nproc", "2", "--save-every", "3"
    )
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (folder / "stopped.run/checkpoint.gguf").exists():
        assert started.poll() is None
        time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    said = started.communicate(timeout=60)[1]
    assert started.returncode == 130 and "continue with: packtrain train" in said
