"""Several processes that train one model: the same losses as one, the same bits each time, and what ends them."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtrain import ranks
from packtrain.cli import main
from packtrain.ranks import exchange, world
from packtrain.training.state import load
from packtrain.watch import metrics
from tests.kill import KINDS, prepare_base, words
from tests.ranked import FEW, by_hand, close, done, errors, losses, same, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("ranks")
    (made / "text.txt").write_text(words())
    return made


def about(folder: Path, name: str) -> dict[str, Any]:
    found = load(folder / f"{name}.run/checkpoint.gguf", print)
    assert found is not None
    return found.about


def test_numbers_are_exchanged_in_buckets_that_cover_all(monkeypatch):
    monkeypatch.setattr(exchange, "BUCKET", 7)
    arrays = [np.arange(n, dtype=np.float32) for n in (3, 1, 20, 4)]
    buckets = list(exchange.buckets(arrays))
    assert [sum(piece.size for piece in one) for one in buckets] == [7, 7, 7, 7]
    flat = np.concatenate([piece for one in buckets for piece in one])
    assert flat.tolist() == np.concatenate(arrays).tolist()
    assert all(any(np.shares_memory(p, a) for a in arrays) for one in buckets for p in one)


def test_without_torch_one_sentence_names_the_extra(folder, monkeypatch, capsys):
    monkeypatch.setattr(world, "find_spec", lambda name: None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(train(folder, "none")[3:]) == 2
    assert capsys.readouterr().err == (
        "packtrain: error: several processes need PyTorch: pip install packtrain[torch]\n"
    )


def test_a_process_alone_exchanges_nothing():
    alone = ranks.here()
    assert (alone.rank, alone.size, alone.gather(3), alone.total(2.5)) == (0, 1, [3], 2.5)


@pytest.mark.torch
def test_two_ranks_train_as_one_and_with_the_same_bits_each_time(folder):
    asked = ["--iters", "200", "--steps-per-eval", "50", "--memory", "400MiB"]
    done(train(folder, "one", *asked))
    done(train(folder, "two", *asked, "--nproc", "2"))
    close(folder, "one", "two", 200)
    done(train(folder, "again", *asked, "--nproc", "2"))
    same(folder, "two", "again")
    end = metrics.read(folder / "two.run/metrics.jsonl")[-1]
    assert end["event"] == "end" and end["peak_bytes"] <= end["planned_bytes"] <= 400 << 20


@pytest.mark.torch
def test_as_many_ranks_as_micro_batches_have_the_bits_of_one_process(folder):
    asked = ["--iters", "20", "--grad-accumulation-steps", "2", "--memory", "400MiB"]
    done(train(folder, "micro", *asked))
    done(train(folder, "micros", *asked, "--nproc", "2"))
    assert not about(folder, "micro")["layered"]  # one process adds them one after the other, too
    same(folder, "micro", "micros")


@pytest.mark.torch
def test_an_adapter_is_tuned_by_two_ranks_as_by_one(folder):
    prepare_base(folder)
    flags = KINDS["finetune"].flags(folder)
    flags[flags.index("0.1")] = "0"  # dropout: its mask is drawn for each micro-batch
    flags[flags.index("--batch-size") + 1] = "4"
    # at this rate the losses stay far from 0, near which f32 has no five digits of them
    asked = ["--iters", "200", "--steps-per-eval", "50", "--lr", "1e-5", *FEW]
    for name, more in (("tuned", []), ("both", ["--nproc", "2"])):
        output = ["-o", str(folder / f"{name}.gguf")]
        done([sys.executable, "-m", "packtrain", *flags, *output, *asked, *more])
    close(folder, "tuned", "both", 200)


@pytest.mark.torch
def test_a_run_goes_on_with_the_same_bits_or_with_another_number_of_ranks(folder):
    constant = ["--lr-scheduler", "constant", "--steps-per-eval", "5", "--warmup-ratio", "0"]
    done(train(folder, "whole", *constant, "--iters", "10", "--nproc", "2"))
    done(train(folder, "parts", *constant, "--iters", "5", "--nproc", "2"))
    done(train(folder, "parts", "--iters", "10", "--resume"))
    same(folder, "whole", "parts")
    said = done(train(folder, "parts", "--iters", "15", "--resume", "--nproc", "1"))
    assert "the run had 2 processes and has 1 now" in said
    assert len(losses(folder, "parts")) == 15


@pytest.mark.torch
@pytest.mark.parametrize("setting, what", [("--lr", "--lr"), ("--data", "the data")])
def test_what_differs_between_ranks_is_found_before_step_1(folder, setting, what):
    (folder / "other.txt").write_text(words()[:-200] + "A cat ate the moon. " * 10)
    value = {"--lr": "0.5", "--data": str(folder / "other.txt")}[setting]
    first, second = errors(by_hand(train(folder, "odd"), [], [setting, value]), 110)
    assert first == second and first.startswith(f"packtrain: error: rank 1 has {what} "), first
    assert not (folder / "odd.run").exists()


@pytest.mark.torch
def test_ctrl_c_stops_all_ranks_after_saving(folder):
    command = train(folder, "stopped", "--iters", "100000", "--nproc", "2", "--save-every", "3")
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (folder / "stopped.run/checkpoint.gguf").exists():
        assert started.poll() is None
        time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    said = started.communicate(timeout=60)[1]
    assert started.returncode == 130 and "continue with: packtrain train" in said
