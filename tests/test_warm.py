"""Mixtures of experts: warmed up, and whatever the router does, planned for."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain import debug, interpret
from packtrain.cli.event_output import TerminalEvents
from packtrain.cli.main import main
from packtrain.common.errors import Interrupted
from packtrain.common.events import Counted, Events, TaskCallbacks
from packtrain.models.config import Config
from packtrain.models.model_file import open_model, save_model
from packtrain.models.model_metadata import model_metadata
from packtrain.workflows import generation_settings as warming
from packtrain.workflows.generation_settings import DecodingOptions, warm
from tests.architectures import CONFIGS, random_model, random_weights, vocabulary
from tests.models import bind_graph, gradient_graph, relative_error, seeded_batch
from tests.numpy_models import Model

TIME = 48
smaps = pytest.mark.skipif(
    not os.path.exists("/proc/self/smaps"), reason="Linux tells what is in memory"
)


SETTINGS = DecodingOptions(Path("a.gguf"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("warm") / "a.gguf"
    random_model(path, "llama experts")
    return path


def resident_nbytes(path: Path) -> int:
    """Bytes of a file that this process has mapped and touched."""
    nbytes, is_mapped = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_mapped = line.endswith(str(path))
        elif is_mapped and line.startswith("Rss:"):
            nbytes += int(line.split()[1]) << 10
    return nbytes


def experts_nbytes(path: Path) -> int:
    gguf = open_model(path).gguf
    return sum(gguf.array(n).nbytes for n in gguf.entries if "_exps." in n)


@smaps
def test_all_experts_are_read(path: Path):
    model, nbytes = open_model(path), experts_nbytes(path)
    start_nbytes = resident_nbytes(path)
    assert nbytes > 10 << 20 > start_nbytes
    warm(SETTINGS, model, Events())
    assert resident_nbytes(path) >= nbytes


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_commands_warm_up_unless_told_not_to(
    path: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    labels, counting = list[str](), TerminalEvents.counting

    def recorded(self: TerminalEvents, label: str, unit: str) -> AbstractContextManager[Counted]:
        labels.append(label)
        return counting(self, label, unit)

    monkeypatch.setattr(TerminalEvents, "counting", recorded)
    monkeypatch.setattr("sys.stdin", StringIO("a\n"))
    for flag, count in (("--no-warmup", 0), ("--resident=4GiB", 0), ("--temp=0", 1)):
        assert main([command, str(path), "-n", "1", flag]) == 0
        assert labels.count("reading experts") == count


class RecordingEvents(Events):
    def __init__(self, stop: bool = False) -> None:
        self.counts, self.said, self.stop = list[tuple[int, int]](), list[str](), stop

    def message(self, text: str) -> None:
        self.said.append(text)

    @contextmanager
    def counting(self, label: str, unit: str) -> Iterator[Counted]:
        assert (label, unit) == ("reading experts", "matrix")
        yield lambda done, total, *texts: self.counts.append((done, total))


def test_progress_is_told_and_it_can_be_stopped(path: Path, tmp_path: Path):
    events = RecordingEvents()
    warm(SETTINGS, open_model(path), events)
    assert events.counts == [(n, 6) for n in range(1, 7)] and events.said == []
    callbacks = TaskCallbacks()
    callbacks.cancel.set()
    with pytest.raises(Interrupted, match="stopped while the experts were read"):
        warm(SETTINGS, open_model(path), callbacks)
    random_model(tmp_path / "dense.gguf", "llama")
    events = RecordingEvents()
    warm(SETTINGS, open_model(tmp_path / "dense.gguf"), events)
    assert (events.counts, events.said) == ([], [])


def test_experts_beyond_memory_are_left_where_they_are(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(warming, "total_nbytes", lambda: 1 << 20)
    events = RecordingEvents()
    warm(SETTINGS, open_model(path), events)
    assert events.counts == []
    assert events.said == [
        "the experts have 12.0 MiB and the memory 1.0 MiB; they are read as they are needed"
    ]


# ---- the worst routing


def routed_model(kind: str, used: int) -> tuple[Config, dict[str, np.ndarray]]:
    """A model whose router sends all tokens to its first experts, or spreads them."""
    config = replace(CONFIGS["llama experts"], expert_used_count=used)
    weights = random_weights(config)
    for i in range(config.block_count):
        weights[f"blk.{i}.ffn_gate_inp.weight"] *= kind == "many"  # the lower of equal logits
    return config, weights


@pytest.mark.parametrize("used", [1, 2])
@pytest.mark.parametrize("kind", ["one", "many"])
def test_a_context_reads_a_prompt_that_goes_to_one_expert(tmp_path: Path, kind: str, used: int):
    config, weights = routed_model(kind, used)
    save_model(tmp_path / "a.gguf", config, vocabulary(), weights.__getitem__, name="routed")
    tokens = np.random.RandomState(5).randint(3, 259, TIME)
    with debug("poison"):
        ctx = pt.Context(tmp_path / "a.gguf", cells=TIME, rows=TIME, cache="f32")
        got = ctx.decode(tokens.tolist(), wanted=range(TIME))
    keys = {key: value.value for key, value in model_metadata(config, "routed").items()}
    expected = Model(keys, weights, TIME).logits(tokens)
    assert np.abs(got - expected).max() <= 1e-4


@pytest.mark.parametrize("used", [1, 2])
@pytest.mark.parametrize("kind", ["one", "many"])
def test_a_step_whose_tokens_all_go_to_one_expert(kind: str, used: int):
    config, weights = routed_model(kind, used)
    graph, fed = gradient_graph(config, 2, 24), seeded_batch(config, 2, 24)
    exact = interpret(graph, weights | fed)
    with debug("poison"):
        got = bind_graph(graph, weights)(fed)
    assert max(relative_error(got[name], exact[name]) for name in got) <= 1e-4
    has_gradient = exact["d/blk.1.ffn_up_exps.weight"].any(axis=(1, 2))
    assert has_gradient.sum() == used if kind == "one" else has_gradient.all()
