"""A model over several memories from the command line: --device, --gpu-layers, --split, --device-memory."""

import json
import re
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packtrain as pt
from packtrain import kernels
from packtrain.cli.main import main
from packtrain.common.errors import InputError
from packtrain.engine import backends
from packtrain.engine.backends import SeparateHost
from packtrain.models.config import Config
from packtrain.planner.device_spread import parse_spread
from packtrain.planner.step_shape import StepShape

MIB = 1 << 20
SIZES = {"dim": 64, "layers": 4, "heads": 4, "vocab_size": 300, "ctx": 64, "batch_size": 4}
SHORT = {"iters": 4, "threads": 1, "sample_every": 0, "overwrite": True, "warmup_ratio": 0.0}
SHAPE = StepShape(Config(64, 16, 32, 8, 64, 2, 2), 2, 16)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = kernels.threads()
    yield
    kernels.set_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spread")
    words = "bal cem dis hor fin gut"
    rows = [f"{words} {i % 17} {words[: i % 20]}" for i in range(400)]
    (folder / "text.txt").write_text("\n".join(rows))
    return folder


def run_training(folder: Path, **settings: object) -> Any:
    settings = {"output": folder / "m.gguf", **SIZES, **SHORT, **settings}
    return pt.train(folder / "text.txt", **settings)


@pytest.fixture(scope="module")
def expected_losses(folder: Path) -> list[float]:
    return list(run_training(folder).losses)


@pytest.fixture
def peak_nbytes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The most bytes that a run takes at once of each memory beside the process's own."""
    current, peaks = dict[str, int](), dict[str, int]()
    original_alloc = SeparateHost.alloc

    def take(space: str, nbytes: int) -> None:
        current[space] = current.get(space, 0) + nbytes
        peaks[space] = max(peaks.get(space, 0), current[space])

    def alloc(self: SeparateHost, nbytes: int) -> np.ndarray:
        take(self.space, nbytes)
        buffer = original_alloc(self, nbytes)
        weakref.finalize(buffer, take, self.space, -nbytes)
        return buffer

    monkeypatch.setattr(SeparateHost, "alloc", alloc)
    return peaks


# ---- where blocks go -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "blocks", "last"),
    [
        ({"device": "cpu:1", "gpu_layers": "3"}, "cpu " * 5 + "cpu:1 " * 3, "cpu"),
        ({"device": "cpu:1", "gpu_layers": "8"}, "cpu:1 " * 8, "cpu"),
        ({"device": "cpu:1", "gpu_layers": "99"}, "cpu:1 " * 8, "cpu:1"),
        ({"device": "cpu:1", "gpu_layers": "0"}, "cpu " * 8, "cpu"),
        ({"device": "cpu,cpu:1", "split": "3,5"}, "cpu " * 3 + "cpu:1 " * 5, "cpu:1"),
        ({"device": "cpu:1,cpu:2"}, "cpu:1 " * 4 + "cpu:2 " * 4, "cpu:2"),
        ({"device": "cpu:1,cpu:2", "memory": "1GiB,3GiB"}, "cpu:1 " * 2 + "cpu:2 " * 6, "cpu:2"),
        ({"device": "cpu:1,cpu:2", "split": "1,0"}, "cpu:1 " * 8, "cpu:2"),
        ({"device": "cpu:1,cpu:2", "gpu_layers": "4", "split": "1,3"}, "cpu " * 4 + "cpu:1 " + "cpu:2 " * 3, "cpu"),
    ],
)  # fmt: skip
def test_blocks_go_where_they_are_sent(flags: dict[str, str], blocks: str, last: str) -> None:
    settings = parse_spread(**flags)
    on = settings.spread_blocks(SHAPE, settings.num_device_blocks(SHAPE))
    first = on.backends[0]
    at = [on.homes.get(f"blk.{i}.ffn_up.weight", first).space for i in range(8)]
    assert [space.replace("host", "cpu") for space in at] == blocks.split()
    assert on.homes.get("output_norm.weight", first).space.replace("host", "cpu") == last
    assert "token_embd.weight" not in on.homes
    cache = pt.state("cache.k.7", (4,), role="cache")
    moment = pt.state("m/blk.7.ffn_up.weight", (4,))
    assert {on.home(cache).space, on.home(moment).space} == {at[7]}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"device": "fra"}, "device fra: it must be one of cpu, numpy, torch:cpu, cuda, mps, or NAME:N"),
        ({"device": "cpu,cpu"}, "each memory can be named once"),
        ({"device": "cpu", "gpu_layers": "2"}, "--gpu-layers needs a --device with a memory of its own"),
        ({"device": "cpu:1", "gpu_layers": "two"}, "--gpu-layers two: it must be a number of blocks, or auto"),
        ({"device": "cpu,cpu:1", "split": "1"}, "--split 1: it must be 2 numbers such as 3,5"),
        ({"device": "cpu,cpu:1", "split": "0,0"}, "--split 0,0: it must be 2 numbers"),
        ({"device": "cpu,cpu:1", "split": "a,b"}, "--split a,b: it must be 2 numbers"),
        ({"device": "cpu", "memory": "1GiB"}, "cpu works in the memory of this process, whose limit is --memory"),
        ({"device": "cpu:1", "memory": "1GiB,2GiB"}, "has 2 sizes for 1 memories"),
        ({"device": "cpu:1", "memory": "much"}, "--device-memory: 'much' is not a size"),
        ({"device": "cpu:1", "memory": "50%"}, "--device-memory 50%: give a size such as 2GiB"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence(flags: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        parse_spread(**flags)


def test_memories_of_a_kind_are_their_own() -> None:
    assert backends.backend("cpu:1") == backends.backend("cpu:1") != backends.backend("cpu:2")
    assert backends.backend("cpu:1").name == "cpu"


# ---- runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"device": "cpu,cpu:1", "split": "1,3", "sample_every": 2, "sample_prompt": "bal"},
        {"device": "cpu:1,cpu:2"},
        {"device": "cpu:1", "gpu_layers": "2"},
        {"device": "cpu:1", "gpu_layers": "auto"},
        {"device": "cpu:1,cpu:2", "gpu_layers": "3", "split": "2,1", "grad_accumulation_steps": 2, "batch_size": 2},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)  # fmt: skip
def test_losses_are_those_of_one_memory(
    settings: dict[str, str],
    folder: Path,
    expected_losses: list[float],
    peak_nbytes: dict[str, int],
) -> None:
    done = run_training(folder, **settings)
    if "batch_size" in settings:
        expected_losses = list(run_training(folder, batch_size=2, grad_accumulation_steps=2).losses)
    assert list(done.losses) == expected_losses
    plans = done.plan.plans
    spaces = {space for space in settings["device"].split(",") if space != "cpu"}
    assert peak_nbytes.keys() == spaces == {*plans.device_spaces}
    for space, nbytes in peak_nbytes.items():
        assert nbytes <= plans.nbytes_in(space), space
        assert nbytes > 0.95 * plans.nbytes_in(space), space


def test_finetune_on_two_memories(folder: Path, peak_nbytes: dict[str, int]) -> None:
    """LoRA on Q8_0, whose blocks were copied; an adapter of the same bits."""
    run_training(folder, output=folder / "b.gguf")
    pt.quantize(folder / "b.gguf", folder / "q.gguf", "q8_0")
    results = []
    for device in ("cpu", "cpu,cpu:1"):
        options = {"device": device, "iters": 3, "ctx": 32, "batch_size": 2, "threads": 1}
        options |= {"output": folder / "t.gguf", "overwrite": True}
        done = pt.finetune(folder / "q.gguf", folder / "text.txt", **options)
        results.append((done.losses, (folder / "t.run/adapter.gguf").read_bytes()))
    assert results[0] == results[1] and peak_nbytes["cpu:1"] > 0


def test_a_run_over_two_memories_resumes_bit_for_bit(folder: Path) -> None:
    options = {"device": "cpu,cpu:1", "iters": 6, "save_every": 1}
    full_losses, stop = run_training(folder, **options).losses, threading.Event()

    def stop_at_third(step: Any) -> None:
        if step.step == 3:
            stop.set()

    stopped = run_training(folder, **options, on_step=stop_at_third, cancel=stop)
    assert stopped.stopped
    resume_options = {**options, "resume": True, "overwrite": False}
    with pytest.raises(InputError, match="split was"):
        run_training(folder, **resume_options, split="1,3")
    assert run_training(folder, **resume_options).losses == full_losses


@pytest.mark.torch
def test_a_memory_of_pytorch_beside_the_cpu(folder: Path, expected_losses: list[float]) -> None:
    """Some blocks on each, and all on its own one."""
    for options in ({"gpu_layers": "2"}, {}):
        done = run_training(folder, device="torch:cpu:1", **options)
        assert list(done.losses) == pytest.approx(expected_losses, rel=1e-4)
    done = run_training(folder, device="cpu:1,torch:cpu:1")
    assert list(done.losses) == pytest.approx(expected_losses, rel=1e-4)
    assert done.plan.plans.device_spaces == ["cpu:1", "torch:cpu:1"]


# ---- limits --------------------------------------------------------------------------------------------------


def refusal_text(folder: Path, **settings: object) -> str:
    with pytest.raises(pt.DoesNotFit) as caught:
        run_training(folder, **settings)
    return str(caught.value)


@pytest.mark.parametrize("settings", [{"device": "cpu:1"}, {"device": "cpu:1", "gpu_layers": "3"}])
def test_a_refusal_names_the_least_which_does(
    settings: dict[str, str],
    folder: Path,
    expected_losses: list[float],
    peak_nbytes: dict[str, int],
) -> None:
    said = refusal_text(folder, **settings, device_memory="1MiB")
    hint = "the smallest device_memory that would do is"
    match = re.search(rf"it has 1\.0 MiB, .* needed; {hint} (\d+)MiB", said)
    assert match, said
    min_mib = int(match[1])
    done = run_training(folder, **settings, device_memory=f"{min_mib}MiB")
    assert done.plan.plans.nbytes_in("cpu:1") <= min_mib * MIB
    assert peak_nbytes["cpu:1"] <= min_mib * MIB
    assert list(done.losses) == pytest.approx(expected_losses, rel=1e-5)
    assert "the memory of cpu:1" in refusal_text(
        folder, **settings, device_memory=f"{min_mib - 1}MiB"
    )


def test_as_many_blocks_as_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More memory, more blocks; all keep to it."""
    counts = []
    for size in ("3MiB", "5MiB", "1GiB"):
        done = run_training(folder, device="cpu:1", gpu_layers="auto", device_memory=size)
        homes = done.plan.plans.target.homes
        counts.append(sum(name.startswith("cache.") for name in homes))
        assert done.plan.plans.nbytes_in("cpu:1") <= {"3": 3, "5": 5, "1": 1024}[size[0]] * MIB
    assert counts == sorted(counts) and counts[0] < counts[-1] == 4, counts


def test_plan_prints_splits_copies_and_bytes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    about = [
        "--device=cpu,cpu:1",
        "--split=1,3",
        "--device-memory=64MiB",
        f"--json={folder}/p.json",
    ]
    run_flags = [f"--data={folder}/text.txt", f"-o={folder}/p.gguf", "--iters=3", "--threads=1"]
    run_flags += [f"--json={folder}/p.json"]
    assert main(["plan", "train", *run_flags, *flags, *about]) == 0
    shown = capsys.readouterr().out
    assert "in the memory of cpu:1, which has 64.0 MiB\n" in shown
    assert re.search(r"crosses   6 splits a step, 10 copies of 27\d\.\d KiB", shown), shown
    report = json.loads((folder / "p.json").read_text())
    assert report["splits"] == [["host", "cpu:1", "host", "cpu:1", "host", "cpu:1"]]
    assert len(report["copies_bytes"][0]) == 10 and report["spaces"]["cpu:1"]["bytes"] > MIB


# ---- moments in the memory of the process ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"optimizer": "sgd", "momentum": 0.9, "lr": 0.01}, {"optimizer": "muon"}]
)
def test_moments_that_stay_here_train_the_same(
    folder: Path, peak_nbytes: dict[str, int], settings: dict[str, Any]
) -> None:
    on_device, offloaded = (
        run_training(folder, device="cpu:1", offload=offload, **settings)
        for offload in ("none", "moments")
    )
    assert list(offloaded.losses) == list(on_device.losses)
    plans = on_device.plan.plans, offloaded.plan.plans
    moved = plans[0].role_nbytes("moment", space="cpu:1")
    assert moved and not plans[1].role_nbytes("moment", space="cpu:1")
    assert plans[1].role_nbytes("moment", space="host") == moved
    saved_nbytes = plans[0].nbytes_in("cpu:1") - plans[1].nbytes_in("cpu:1")
    assert moved / 2 <= saved_nbytes <= 2 * moved
    assert 0 < peak_nbytes["cpu:1"] <= max(plan.nbytes_in("cpu:1") for plan in plans)


def test_moments_stay_here_where_a_run_else_would_not_fit(
    folder: Path,
    expected_losses: list[float],
    peak_nbytes: dict[str, int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    device = {"device": "cpu:1"}
    assert not run_training(folder, **device).plan.job.offloaded
    no_offload, said = (
        re.search(r"smallest device_memory that would do is (\d+)MiB", text)
        for text in (
            refusal_text(folder, **device, offload="none", device_memory="1MiB"),
            refusal_text(folder, **device, device_memory="1MiB"),
        )
    )
    assert no_offload and said and int(said[1]) < int(no_offload[1])
    peak_nbytes.clear()
    done = run_training(folder, **device, device_memory=f"{said[1]}MiB")
    assert done.plan.job.offloaded and peak_nbytes["cpu:1"] <= int(said[1]) * MIB
    assert list(done.losses) == pytest.approx(expected_losses, rel=1e-5)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    planned = ["plan", "train", "--data", str(folder / "text.txt"), "--device=cpu:1", *flags]
    for size, is_reported in ((said[1], True), ("100", False)):
        assert main([*planned, f"--device-memory={size}MiB"]) == 0
        assert ("moments stay in this process's memory" in capsys.readouterr().err) == is_reported


def test_a_run_that_goes_on_leaves_moments_where_they_were(folder: Path) -> None:
    """Rounding depends on it, and a resumed run has the bits of one that was not stopped."""
    options = {"device": "cpu:1", "lr_scheduler": "constant", "val_split": 0.0}
    full_run = run_training(folder, **options, offload="moments")
    expected = (folder / "m.gguf").read_bytes()
    run_training(folder, **options, offload="moments", iters=2)
    done = run_training(folder, **options, overwrite=False, resume=True)
    assert done.plan.job.offloaded and list(done.losses)[-2:] == list(full_run.losses)[-2:]
    assert (folder / "m.gguf").read_bytes() == expected
