"""Several processes that train one model: the same losses as one, the same bits each time, and what ends them."""

import os
import re
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
from packtrain.gguf import GGUF
from packtrain.ranks import world
from packtrain.training.state import load
from packtrain.watch import metrics
from tests.kill import ALWAYS, KINDS, TINY, prepare_base, words

FEW = ["--no-tensorboard", "-t", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("ranks")
    (made / "text.txt").write_text(words())
    return made


def train(folder: Path, name: str, *more: str) -> list[str]:
    files = ["--data", str(folder / "text.txt"), "-o", str(folder / f"{name}.gguf")]
    return [sys.executable, "-m", "packtrain", "train", *files, *TINY, *FEW, *more]


def done(command: list[str], code: int = 0, **environment: str) -> str:
    ended = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )
    assert ended.returncode == code, ended.stderr
    return ended.stderr


def losses(folder: Path, name: str, key: str = "loss") -> np.ndarray:
    records = metrics.read(folder / f"{name}.run/metrics.jsonl")
    return np.array([record[key] for record in records if key in record])


def same(folder: Path, one: str, other: str) -> None:
    """Weights, moments and losses are equal, bit for bit."""
    for result in ALWAYS:
        a, b = (GGUF(folder / result.format(name)) for name in (one, other))
        assert a.entries.keys() == b.entries.keys()
        for name in a.entries:
            assert a.array(name).tobytes() == b.array(name).tobytes(), name
    for key in ("loss", "grad_norm", "val_loss"):
        assert losses(folder, one, key).tolist() == losses(folder, other, key).tolist()


def about(folder: Path, name: str) -> dict[str, Any]:
    found = load(folder / f"{name}.run/checkpoint.gguf", print)
    assert found is not None
    return found.about


def close(folder: Path, one: str, other: str, steps: int) -> None:
    for key, count in (("loss", steps), ("val_loss", steps // 50)):
        a, b = losses(folder, one, key), losses(folder, other, key)
        assert len(a) == len(b) == count
        assert np.all(np.abs(a - b) <= 1e-5 * a), np.max(np.abs(a - b) / a)


def test_numbers_are_exchanged_in_buckets_that_cover_all(monkeypatch):
    monkeypatch.setattr(world, "BUCKET", 7)
    arrays = [np.arange(n, dtype=np.float32) for n in (3, 1, 20, 4)]
    buckets = list(world.buckets(arrays))
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


def by_hand(command: list[str], *each: list[str]) -> list["subprocess.Popen[str]"]:
    """A rank for each list of more arguments, as torchrun starts them."""
    port = str(ranks.free_port())
    started = []
    for rank, more in enumerate(each):
        own = {"RANK": str(rank), "WORLD_SIZE": str(len(each)), "MASTER_PORT": port}
        own |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        started.append(
            subprocess.Popen(
                [*command, *more], stderr=subprocess.PIPE, text=True, env={**os.environ, **own}
            )
        )
    return started


def errors(started: list["subprocess.Popen[str]"], seconds: float) -> list[str]:
    """What the ranks say at last; each must end, and fail, within so many seconds."""
    until, found = time.monotonic() + seconds, []
    for one in started:
        said = one.communicate(timeout=until - time.monotonic())[1]
        assert one.returncode != 0
        found.append(said.splitlines()[-1] if said else "")
    return found


@pytest.mark.torch
@pytest.mark.parametrize("setting, what", [("--lr", "--lr"), ("--data", "the data")])
def test_what_differs_between_ranks_is_found_before_step_1(folder, setting, what):
    (folder / "other.txt").write_text(words()[:-200] + "A cat ate the moon. " * 10)
    value = {"--lr": "0.5", "--data": str(folder / "other.txt")}[setting]
    first, second = errors(by_hand(train(folder, "odd"), [], [setting, value]), 110)
    assert first == second and first.startswith(f"packtrain: error: rank 1 has {what} "), first
    assert not (folder / "odd.run").exists()


@pytest.mark.torch
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_the_others_and_the_checkpoint_is_whole(folder, killed):
    name = f"killed{killed}"
    command = train(folder, name, "--iters", "100000", "--save-every", "3")
    started = by_hand(command, [], [])
    checkpoint = folder / f"{name}.run/checkpoint.previous.gguf"
    while not checkpoint.exists():
        assert all(one.poll() is None for one in started)
        time.sleep(0.05)
    started[killed].kill()
    said = errors(started, 30)[1 - killed]
    assert re.fullmatch(rf"packtrain: error: rank {killed} was lost: .*--resume", said), said
    done(train(folder, name, "--iters", "4", "--resume"))  # whole: one process loads it


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
