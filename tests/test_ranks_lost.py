"""A rank that is killed, hangs, is cut off or finds its disk full ends the others in time, and the run goes on."""

import os
import re
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

from packtrain.distributed import heartbeat
from tests import hosts
from tests.kill import sample_text
from tests.ranked import by_hand, last_errors, run_checked, train_command, wait_for_checkpoints

ENDLESS = ["--iters", "100000", "--save-every", "3"]
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    run_folder = tmp_path_factory.mktemp("lost")
    (run_folder / "text.txt").write_text(sample_text())
    return run_folder


def check_resumable(folder: Path, name: str) -> None:
    """The checkpoint can be resumed from, by one process."""
    run_checked(train_command(folder, name, "--iters", "4", "--resume"))


@pytest.mark.parametrize(("killed", "zero"), [(0, "0"), (1, "0"), (1, "2")])
def test_a_killed_rank_ends_the_others_and_the_checkpoint_is_whole(folder, killed, zero):
    name = f"killed{killed}{zero}"
    started = by_hand(train_command(folder, name, *ENDLESS, "--zero", zero), [], [])
    wait_for_checkpoints(folder / f"{name}.run/checkpoint.gguf", started)
    started[killed].kill()
    said = last_errors(started, 30)[1 - killed]
    assert re.fullmatch(rf"packtrain: error: rank {killed} was lost: .*--resume", said), said
    check_resumable(folder, name)


def test_a_rank_that_is_killed_before_it_has_joined_ends_the_others(folder):
    command = train_command(folder, "early", *ENDLESS, "--nproc", "2")
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children")
    while len(child_ids := children.read_text().split()) < 2:
        time.sleep(0.01)
    os.kill(int(child_ids[1]), signal.SIGKILL)
    said = started.communicate(timeout=40)[1]
    assert started.returncode == 1 and "rank 1 was ended by signal 9" in said


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_hangs_is_named_by_all_others(folder, stopped):
    name = f"hangs{stopped}"
    started = by_hand(train_command(folder, name, *ENDLESS), [], [])
    wait_for_checkpoints(folder / f"{name}.run/checkpoint.gguf", started)
    started[stopped].send_signal(signal.SIGSTOP)
    try:
        (said,) = last_errors([started[1 - stopped]], 30)
    finally:
        started[stopped].kill()
    pattern = rf"packtrain: error: rank {stopped} was lost: nothing was heard .*--resume"
    assert re.fullmatch(pattern, said), said
    started[stopped].communicate()
    check_resumable(folder, name)


@pytest.mark.skipif(not hosts.can_make_hosts(), reason="needs network namespaces")
def test_a_host_that_is_cut_off_without_a_word_is_named(folder):
    with hosts.network_hosts(2) as two:
        started = by_hand(train_command(folder, "cut", *ENDLESS), [], [], on=two)
        wait_for_checkpoints(folder / "cut.run/checkpoint.gguf", started)
        two.cut(1)
        first, second = last_errors(started, 30)
    assert "rank 1 was lost: nothing was heard of it" in first
    assert "rank 0 was lost: nothing was heard of it" in second
    check_resumable(folder, "cut")


def test_a_full_disk_of_rank_0_is_what_the_others_say(folder):
    started = by_hand(train_command(folder, "full", *ENDLESS), [], [])
    checkpoint = folder / "full.run/checkpoint.gguf"
    wait_for_checkpoints(checkpoint, started)
    limit = checkpoint.stat().st_size // 2
    resource.prlimit(started[0].pid, resource.RLIMIT_FSIZE, (limit, limit))
    first, second = last_errors(started, 30)
    assert "file too large" in first.lower()
    assert re.fullmatch("packtrain: error: rank 0 has ended: .*[Ff]ile too large.*", second), second
    check_resumable(folder, "full")


def test_ranks_end_with_the_process_that_started_them(folder):
    command = train_command(folder, "parent", *ENDLESS, "--nproc", "2")
    started = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_for_checkpoints(folder / "parent.run/checkpoint.gguf", [started])
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    assert len(children) == 2
    started.kill()
    started.wait()
    until = time.monotonic() + 30
    while any(_is_running(int(child)) for child in children):
        assert time.monotonic() < until
        time.sleep(0.1)
    check_resumable(folder, "parent")


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, FileNotFoundError):
        return False


def test_all_that_a_lost_rank_takes_fits_into_half_a_minute():
    seconds = heartbeat.SILENT_SECONDS + 2 * heartbeat.BEAT_SECONDS + heartbeat.GRACE_SECONDS
    assert seconds + 5 < 30
