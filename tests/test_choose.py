"""packtrain choose: the table, what is written, what is refused; nothing is left behind."""

import json
import random
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain.cli.main import main
from packtrain.common.errors import DoesNotFit, InputError
from packtrain.conversion.calibration.calibration_inputs import ReadingPlan
from packtrain.dtypes import DTYPES, Dtype
from packtrain.gguf import GGUF
from packtrain.models.model_file import ModelFile
from packtrain.workflows import type_choice
from packtrain.workflows.type_choice import TypeTrial, _trial_rank
from tests.architectures import random_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A base in Q8_0, an adapter and a whole model that have learned to say yes and no."""
    directory = tmp_path_factory.mktemp("choose")
    random_model(directory / "base.gguf", "llama tied")
    rng, lines = random.Random(0), []
    for _ in range(48):
        is_yes = rng.random() < 0.5
        prompt = "is it so" if is_yes else "what else"
        lines.append({"prompt": prompt, "completion": "a #### yes" if is_yes else "b #### no"})
    (directory / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (directory / "test.jsonl").write_text("\n".join(map(json.dumps, lines[:6])))
    assert main(["quantize", str(directory / "base.gguf"), str(directory / "q8.gguf"), "q8_0"]) == 0
    common_flags = [
        "--data",
        str(directory / "train.jsonl"),
        "--val-split",
        "0",
        "--no-tensorboard",
    ]
    common_flags += ["--batch-size", "2", "--lr", "0.003"]
    full = ["--full", "--epochs", "8", "-o", str(directory / "tuned.gguf")]
    assert main(["finetune", str(directory / "base.gguf"), *common_flags, *full]) == 0
    lora_flags = ["--epochs", "8", "--merge", "none", "-o", str(directory / "lora.gguf")]
    assert main(["finetune", str(directory / "q8.gguf"), *common_flags, *lora_flags]) == 0
    return directory


def losses(folder: Path, *models: Path) -> list[float]:
    return [pt.evaluate(model, folder / "test.jsonl").loss().value for model in models]


def test_the_smallest_that_keeps_enough_is_written(folder: Path, tmp_path: Path) -> None:
    base, tuned = folder / "base.gguf", folder / "tuned.gguf"
    output, rows = tmp_path / "out.gguf", list[str]()
    types = ["f16", "q8_0", "q4_0"]
    choice = pt.choose(
        base, tuned, output, folder / "test.jsonl", type=types, on_message=rows.append
    )
    assert [(attempt.name, attempt.how) for attempt in choice.tries] == [
        (name, "plain") for name in types
    ]
    base_loss, tuned_loss, stored = losses(folder, base, tuned, output)
    assert (choice.base, choice.tuned) == (base_loss, tuned_loss)
    assert choice.best.loss == stored and choice.best.nbytes == output.stat().st_size
    assert choice.best.kept == pytest.approx((base_loss - stored) / (base_loss - tuned_loss))
    sufficient = [attempt for attempt in choice.tries if attempt.kept >= 0.98]
    assert choice.enough and choice.best.nbytes == min(attempt.nbytes for attempt in sufficient)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.gguf"]


def test_the_divergence_of_each_trial_is_from_the_unrounded_model(folder, tmp_path) -> None:
    models, output = (folder / "base.gguf", folder / "tuned.gguf"), tmp_path / "out.gguf"
    options = {"type": ["q4_0", "q8_0"], "keep": 1.0, "on_message": (rows := []).append}
    choice = pt.choose(*models, output, folder / "test.jsonl", kl=True, **options)
    coarse, fine = (attempt.kl.value for attempt in choice.tries)
    assert coarse > 10 * fine > 0 and sum(" KL 0." in row for row in rows) == 2
    measured = pt.evaluate(output, folder / "test.jsonl", kl_base=models[1]).mean_kl()
    assert choice.best.kl == measured


def test_memory_is_refused_before_the_first_trial_with_what_the_largest_needs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first type needs less than the second: its number would be refused again after the first trial."""

    def plans(model: ModelFile, types: Mapping[str, Dtype], *sizes: int) -> list[ReadingPlan]:
        nbytes = 3 << 30 if DTYPES["q8_0"] in types.values() else 2 << 30
        return [ReadingPlan(1, 1, 1, 1, nbytes)]

    monkeypatch.setattr(type_choice, "reading_plans", plans)
    rows = list[str]()
    train, test = folder / "train.jsonl", folder / "test.jsonl"
    models = folder / "base.gguf", folder / "tuned.gguf"
    options = {"type": ["q6_k", "q8_0"], "calibrate": train, "on_message": rows.append}
    with pytest.raises(DoesNotFit, match="write all of the types with calibrate") as error:
        pt.choose(*models, tmp_path / "out.gguf", test, memory="1GiB", **options)
    assert 3 << 10 < int(str(error.value).split()[-1].removesuffix("MiB")) < 5 << 10
    assert not any("keeps" in row for row in rows)


def test_a_type_that_needs_data_is_tried_with_data_alone(folder: Path, tmp_path: Path) -> None:
    base, tuned, test = folder / "base.gguf", folder / "tuned.gguf", folder / "test.jsonl"
    output, train = tmp_path / "out.gguf", tmp_path / "train.jsonl"
    train.write_text("\n".join([(folder / "train.jsonl").read_text()] * 4))
    rows = list[str]()
    with pytest.raises(InputError, match=r"^type iq2_xs is written only with weights of its"):
        pt.choose(base, tuned, output, test, type=["q8_0", "iq2_xs"], on_message=rows.append)
    assert not rows  # before anything is measured
    choice = pt.choose(base, tuned, output, test, type=["q8_0", "iq2_xs"], calibrate=train)
    tried = [(attempt.name, attempt.how) for attempt in choice.tries]
    assert tried == [("q8_0", "plain"), ("q8_0", "with data"), ("iq2_xs", "with data")]


def test_none_is_enough(folder: Path, tmp_path: Path, capsys) -> None:
    """The one that keeps most is written, and it is said."""
    args = ["choose", folder / "base.gguf", folder / "tuned.gguf", "-o", tmp_path / "out.gguf"]
    args += ["--data", folder / "test.jsonl", "--keep", "1", "--type", "q4_0", "--type", "q5_0"]
    assert main([*map(str, args), "--svg", str(tmp_path / "out.svg")]) == 0
    said = capsys.readouterr()
    percentages = [float(row.split("keeps ")[1].rstrip("%")) for row in said.out.splitlines()]
    if max(percentages) < 100:
        assert "no file keeps 100% of the gain" in said.err
    assert percentages[-1] == max(percentages)
    words = [e.text for e in ET.parse(tmp_path / "out.svg").iter() if e.text]
    assert {"q4_0", "q5_0", "● plain"} <= set(words)


def test_an_adapter_is_merged_first(folder: Path, tmp_path: Path) -> None:
    base, lora = folder / "q8.gguf", folder / "lora.run/adapter.gguf"
    choice = pt.choose(
        base, lora, tmp_path / "out.gguf", folder / "test.jsonl", type=["q4_0"],
        also=[folder / "tuned.gguf"], aware=[base], calibrate=folder / "train.jsonl",
    )  # fmt: skip
    attempts = [(attempt.name, attempt.how) for attempt in choice.tries]
    assert attempts[:2] == [("as the base", "plain"), ("as the base", "with data")]
    assert attempts[-2:] == [("q8_0", "aware"), (str(folder / "tuned.gguf"), "as it is")]
    merged = pt.merge(base, lora, tmp_path / "merged.gguf").output
    assert choice.tries[0].loss == losses(folder, merged)[0]
    if choice.best.how == "as it is":
        assert (tmp_path / "out.gguf").read_bytes() == (folder / "tuned.gguf").read_bytes()


def test_the_order_of_tries():
    candidates = {"a": (30, 0.99), "b": (20, 0.985), "c": (10, 0.97), "d": (5, 0.5)}
    tries = [
        TypeTrial(name, "plain", n, 0.0, retained) for name, (n, retained) in candidates.items()
    ]
    assert [one.name for one in sorted(tries, key=lambda one: _trial_rank(0.98, one))] == [*"bacd"]


@pytest.mark.parametrize(
    "overrides, says",
    [
        ({"type": ["q9"]}, "type q9 is unknown; it must be one of"),
        ({"tuned": "base.gguf"}, "its loss on .*without a gain there is nothing to keep"),
        ({"data": "none.jsonl"}, "data.*none.jsonl"),
        ({"also": ["none.gguf"]}, "also.*none.gguf"),
        ({"aware": ["none.gguf"]}, "aware.*none.gguf"),
        ({"output": "tuned.gguf", "overwrite": True}, "is one of the files that are read"),
    ],
)  # fmt: skip
def test_what_is_refused(folder: Path, tmp_path: Path, overrides, says, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    files_before = sorted(folder.iterdir())
    defaults = {"model": "base.gguf", "tuned": "tuned.gguf", "data": "test.jsonl"}
    options = defaults | {"output": str(tmp_path / "out.gguf"), "type": ["f16"]} | overrides
    with pytest.raises(InputError, match=says):
        pt.choose(**options)
    assert sorted(folder.iterdir()) == files_before and not list(tmp_path.iterdir())


def test_what_was_there_stays_when_it_fails(folder: Path, tmp_path: Path) -> None:
    """Values that are not finite are found while a file is written."""
    output, broken = tmp_path / "out.gguf", tmp_path / "broken.gguf"
    output.write_bytes(b"before")
    raw = bytearray((folder / "tuned.gguf").read_bytes())
    entry = GGUF(folder / "tuned.gguf").entries["blk.0.ffn_up.weight"]
    raw[entry.offset : entry.offset + 4] = np.float32(np.nan).tobytes()
    broken.write_bytes(raw)
    with pytest.raises((InputError, ArithmeticError)):
        pt.choose(
            folder / "base.gguf", broken, output, folder / "test.jsonl", overwrite=True,
        )  # fmt: skip
    assert output.read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.gguf", "out.gguf"]
