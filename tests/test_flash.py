"""Attention as one op or written out: chosen by what a backend has, equal within rounding.

That both give every architecture's logits and gradients, test_architectures shows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import packtrain as pt
from packtrain.cli.main import main
from packtrain.common.errors import InputError
from packtrain.dtypes import BLOCK_TYPES, Dtype, f16, f32
from packtrain.engine.backends import CPU, Host, Target
from packtrain.engine.backends.host import Inputs
from packtrain.engine.executor import Session
from packtrain.engine.tensor import Kernel, Op
from packtrain.inference.kv_cache import CacheLayout, Context, RunSizes, place_runs
from packtrain.models.attention_choice import missing_attention_ops, with_flash
from packtrain.models.config import Config
from tests.architectures import random_model
from tests.models import CONFIG, seeded_weights

Q8_0 = BLOCK_TYPES["q8_0"]
WINDOWED = replace(
    CONFIG, embedding_length=128, block_count=3, window=9, window_pattern=(True, False, True), attention_softcap=2.0
)  # fmt: skip
SIZES = RunSizes((8, 4, 1), 8)


@dataclass(frozen=True, slots=True)
class Lesser(Host):
    """The cpu without some ops; allocates nothing while it is asked for them."""

    missing_ops: tuple[str, ...] = ()
    halves: bool = True

    def kernel(self, op: Op[..., Any], inputs: Inputs) -> Kernel | None:
        narrow = not self.halves and any(t is not None and t.dtype == f16 for t in inputs)
        is_missing = op.name in self.missing_ops or (narrow and op.name == "attention_cells")
        return None if is_missing else op.kernels.get("cpu")

    def workspaces(self, op: Op[..., Any], inputs: Inputs, attrs: dict[str, Any]) -> Any:
        rule = op.workspaces.get("cpu")
        return rule(*inputs, **attrs) if rule else ()

    def alloc(self, nbytes: int) -> np.ndarray:
        raise AssertionError("it was only asked")


def context(
    config: Config, cache: CacheLayout, target: Target = CPU, sequences: int = 3
) -> Context:
    session = Session()
    runs = session.executors(place_runs(config, cache, SIZES, target=target, has_moves=True))
    session.set(seeded_weights(config))
    return Context.within(config, cache, SIZES, runs, sequences)


def schedule(ctx: Context) -> np.ndarray:
    """Logits of some batches of three sequences that share a beginning and lose parts."""
    rng, logits = np.random.default_rng(3), list[np.ndarray]()
    logits.append(ctx.decode(rng.integers(0, 50, 14).tolist(), 0, wanted=range(14)))
    ctx.copy(0, 1)
    ctx.copy(0, 2, 0, 6)
    for _ in range(6):
        count = int(rng.integers(1, 7))
        seqs = np.sort(rng.integers(0, 3, count)).tolist()
        tokens = rng.integers(0, 50, count).tolist()
        logits.append(ctx.decode(tokens, seqs, wanted=range(count)))
    ctx.remove(1, 3, 5)
    ctx.shift(1, -2, 5)
    logits.append(ctx.decode([7, 8], [1, 2], wanted=range(2)))
    return np.concatenate(logits)


@pytest.mark.parametrize("ring", [0, 60])
@pytest.mark.parametrize(("dtype", "off"), [(f32, 1e-5), (f16, 1e-4), (Q8_0, 1e-3)])
def test_a_context_computes_the_same_written_out(dtype: Dtype, off: float, ring: int):
    cache = CacheLayout(96, ring, dtype, 3)
    config = replace(WINDOWED, head_count=4, head_count_kv=2)
    fused, unfused = (
        schedule(context(replace(config, flash=use_flash), cache)) for use_flash in (True, False)
    )
    assert np.abs(fused - unfused).max() <= off * np.abs(fused).max()
    assert not np.array_equal(fused, unfused)


def choose_flash(
    target: Target, mode: str = "auto", cache: Dtype | None = f16
) -> tuple[bool, list[str]]:
    said = list[str]()
    return with_flash(
        replace(CONFIG, embedding_length=128), mode, target, said.append, cache
    ).flash, said


def test_auto_takes_the_op_where_the_backend_has_it():
    assert choose_flash(CPU) == (True, []) == choose_flash(CPU, "on")
    assert choose_flash(CPU, "off") == (False, ["attention is written out: --flash-attn off"])
    for cache in (f32, f16, Q8_0, None):
        lesser = Target.for_backend(
            Lesser("lesser", missing_ops=("attention_cells", "attention_back"))
        )
        flash, said = choose_flash(lesser, cache=cache)
        name = "attention_cells" if cache else "attention_back"
        assert not flash and f"attention is written out: lesser has no {name} of f32[" in said[0]
        with pytest.raises(InputError, match=f"--flash-attn on: lesser has no {name} of f32"):
            choose_flash(lesser, "on", cache)


def test_it_depends_on_types_and_on_where_keys_and_values_live():
    lesser = Lesser("lesser", halves=False)
    assert [choose_flash(Target.for_backend(lesser), cache=kind)[0] for kind in (f32, f16)] == [
        True,
        False,
    ]
    assert not choose_flash(Target((lesser, *CPU.backends)))[0]
    assert not choose_flash(Target(CPU.backends, {"cache.0": lesser}))[0]
    assert choose_flash(Target((lesser,), {"cache": CPU.backends[0]}), "on") == (True, [])
    assert missing_attention_ops(CONFIG, Target.for_backend(lesser), f16).endswith(
        "f32[1, 4, 6], f16[1, 2, 6], f16[1, 2, 6]"
    )


def test_a_backend_without_attention_runs_what_is_written_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Lesser, "alloc", Host.alloc)
    lesser = Target.for_backend(Lesser("lesser", missing_ops=("attention_cells",)))
    config = with_flash(CONFIG, "auto", lesser, lambda line: None, f32)
    cache = CacheLayout(96, 0, f32, 3)
    actual, expected = (schedule(context(config, cache, target)) for target in (lesser, CPU))
    assert np.array_equal(actual, expected)


def test_a_context_of_a_file_asks_the_backend(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Lesser, "alloc", Host.alloc)
    lesser, said = Lesser("lesser", missing_ops=("attention_cells",)), list[str]()
    options = {"cells": 32, "cache": "f32"}
    on_lesser = options | {"target": Target.for_backend(lesser), "say": said.append}
    unfused = pt.Context(path, **on_lesser)
    assert not unfused.config.flash and "attention is written out: lesser has no" in said[0]
    fused = pt.Context(path, **options)
    assert fused.config.flash
    logits = unfused.decode([1, 2, 3])
    assert np.abs(logits - fused.decode([1, 2, 3])).max() <= 1e-5 * np.abs(logits).max()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("flash") / "a.gguf"
    random_model(path, "gemma2")
    return path


def test_the_commands_take_it(path: Path, capsys: pytest.CaptureFixture[str]):
    command = ["generate", str(path), "-p", "the cat", "-n", "8", "--temp", "0"]
    texts = []
    for mode in ("on", "off"):
        assert main([*command, "-fa", mode]) == 0
        out, said = capsys.readouterr()
        texts.append(out)
        assert ("attention is written out: --flash-attn off" in said) == (mode == "off")
    assert texts[0] == texts[1]
    assert main([*command, "-fa", "maybe"]) == 2
    assert "--flash-attn is maybe; it must be one of auto, on, off" in capsys.readouterr().err


@pytest.mark.parametrize(
    "measured",
    [
        lambda model, text, **options: pt.evaluate(model, text, ctx=24, **options).losses.popitem()[1],
        lambda model, text, **options: pt.embed(model, ["the cat", "a"], **options),
        lambda model, text, **options: pt.finetune(
            model, text, output=text.with_suffix(".gguf"), iters=2, ctx=24, full=True, overwrite=True, **options
        ).losses,
    ],
    ids=["eval", "embed", "finetune"],
)  # fmt: skip
def test_both_give_the_same(path: Path, tmp_path: Path, measured: Callable):
    (tmp_path / "t.txt").write_text("the cat sees the dog\n" * 60)
    fused, unfused = (
        np.array(measured(path, tmp_path / "t.txt", flash_attn=mode)) for mode in ("on", "off")
    )
    np.testing.assert_allclose(unfused, fused, rtol=2e-5, atol=2e-5)
