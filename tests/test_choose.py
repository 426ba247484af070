"""packtrain choose: the table, what is written, what is refused; nothing is left behind."""

import json
import random
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain.cli.main import main
from packtrain.common.errors import InputError
from packtrain.gguf import GGUF
from packtrain.workflows.type_choice import Try, _order
from tests.architectures import random_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A base in Q8_0, an adapter and a whole model that have learned to say yes and no."""
    made = tmp_path_factory.mktemp("choose")
    random_model(made / "base.gguf", "llama tied")
    rng, lines = random.Random(0), []
    for _ in range(48):
        sure = rng.random() < 0.5
        asked = "is it so" if sure else "what else"
        lines.append({"prompt": asked, "completion": "a #### yes" if sure else "b #### no"})
    (made / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (made / "test.jsonl").write_text("\n".join(map(json.dumps, lines[:6])))
    assert main(["quantize", str(made / "base.gguf"), str(made / "q8.gguf"), "q8_0"]) == 0
    usual = ["--data", str(made / "train.jsonl"), "--val-split", "0", "--no-tensorboard"]
    usual += ["--batch-size", "2", "--lr", "0.003"]
    full = ["--full", "--epochs", "8", "-o", str(made / "tuned.gguf")]
    assert main(["finetune", str(made / "base.gguf"), *usual, *full]) == 0
    beside = ["--epochs", "8", "--merge", "none", "-o", str(made / "lora.gguf")]
    assert main(["finetune", str(made / "q8.gguf"), *usual, *beside]) == 0
    return made


def losses(folder: Path, *models: Path) -> list[float]:
    return [pt.evaluate(model, folder / "test.jsonl").loss().value for model in models]


def test_the_smallest_that_keeps_enough_is_written(folder: Path, tmp_path: Path) -> None:
    base, tuned = folder / "base.gguf", folder / "tuned.gguf"
    output, rows = tmp_path / "out.gguf", list[str]()
    types = ["f16", "q8_0", "q4_0"]
    found = pt.choose(
        base, tuned, output, folder / "test.jsonl", type=types, on_message=rows.append
    )
    assert [(one.name, one.how) for one in found.tries] == [(name, "plain") for name in types]
    before, after, stored = losses(folder, base, tuned, output)
    assert (found.base, found.tuned) == (before, after)
    assert found.best.loss == stored and found.best.nbytes == output.stat().st_size
    assert found.best.kept == pytest.approx((before - stored) / (before - after))
    enough = [one for one in found.tries if one.kept >= 0.98]
    assert found.enough and found.best.nbytes == min(one.nbytes for one in enough)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.gguf"]


def test_none_is_enough(folder: Path, tmp_path: Path, capsys) -> None:
    """The one that keeps most is written, and it is said."""
    given = ["choose", folder / "base.gguf", folder / "tuned.gguf", "-o", tmp_path / "out.gguf"]
    given += ["--data", folder / "test.jsonl", "--keep", "1", "--type", "q4_0", "--type", "q5_0"]
    assert main([*map(str, given), "--svg", str(tmp_path / "out.svg")]) == 0
    said = capsys.readouterr()
    kept = [float(row.split("keeps ")[1].rstrip("%")) for row in said.out.splitlines()]
    if max(kept) < 100:
        assert "no file keeps 100% of the gain" in said.err
    assert kept[-1] == max(kept)
    words = [e.text for e in ET.parse(tmp_path / "out.svg").iter() if e.text]
    assert {"q4_0", "q5_0", "● plain"} <= set(words)


def test_an_adapter_is_merged_first(folder: Path, tmp_path: Path) -> None:
    base, lora = folder / "q8.gguf", folder / "lora.run/adapter.gguf"
    found = pt.choose(
        base, lora, tmp_path / "out.gguf", folder / "test.jsonl", type=["q4_0"],
        also=[folder / "tuned.gguf"], aware=[base], calibrate=folder / "train.jsonl",
    )  # fmt: skip
    ways = [(one.name, one.how) for one in found.tries]
    assert ways[:2] == [("as the base", "plain"), ("as the base", "with data")]
    assert ways[-2:] == [("q8_0", "aware"), (str(folder / "tuned.gguf"), "as it is")]
    merged = pt.merge(base, lora, tmp_path / "merged.gguf").output
    assert found.tries[0].loss == losses(folder, merged)[0]
    if found.best.how == "as it is":
        assert (tmp_path / "out.gguf").read_bytes() == (folder / "tuned.gguf").read_bytes()


def test_the_order_of_tries():
    keeps = {"a": (30, 0.99), "b": (20, 0.985), "c": (10, 0.97), "d": (5, 0.5)}
    tries = [Try(name, "plain", n, 0.0, kept) for name, (n, kept) in keeps.items()]
    assert [one.name for one in sorted(tries, key=lambda one: _order(0.98, one))] == [*"bacd"]


@pytest.mark.parametrize(
    "given, says",
    [
        ({"type": ["q9"]}, "type q9 is unknown; it must be one of"),
        ({"tuned": "base.gguf"}, "its loss on .*without a gain there is nothing to keep"),
        ({"memory": "1GiB"}, "memory has no effect without calibrate"),
        ({"data": "none.jsonl"}, "data.*none.jsonl"),
        ({"also": ["none.gguf"]}, "also.*none.gguf"),
        ({"aware": ["none.gguf"]}, "aware.*none.gguf"),
        ({"output": "tuned.gguf", "overwrite": True}, "is one of the files that are read"),
    ],
)  # fmt: skip
def test_what_is_refused(folder: Path, tmp_path: Path, given, says, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    usual = {"model": "base.gguf", "tuned": "tuned.gguf", "data": "test.jsonl"}
    asked = usual | {"output": str(tmp_path / "out.gguf"), "type": ["f16"]} | given
    with pytest.raises(InputError, match=says):
        pt.choose(**asked)
    assert sorted(folder.iterdir()) == before and not list(tmp_path.iterdir())


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
