"""A model in packtrain and in llama.cpp, asked the same: what the tables of benchmarks.conformance are made of."""

import contextlib
import io
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.cli.main import main as packtrain
from packtrain.inference.generator import Generator
from packtrain.models.model_file import ModelFile

TOP, REPLY = 5, 24


def ask_peer(python: str, **question: Any) -> dict[str, Any]:
    """llama.cpp's answer, see benchmarks/peer.py."""
    command, variables = [python, "-m", "benchmarks.peer"], dict(os.environ)
    if (libraries := Path(python).absolute().parents[1] / "cpp/bin").exists():
        variables["LLAMA_CPP_LIB_PATH"] = str(libraries)  # where `make conformance` builds them
    done = subprocess.run(
        command, input=json.dumps(question), capture_output=True, text=True, env=variables
    )
    if done.returncode:
        raise SystemExit(f"llama.cpp ended with {done.returncode}: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def logits(model: ModelFile, tokens: Sequence[int]) -> np.ndarray:
    """At every position, fed one by one; the last row is from all in one, which must not differ."""
    generator = Generator.from_model(model, len(tokens))
    rows = [generator.feed([token]).copy() for token in tokens]
    generator.truncate()
    return np.array([*rows[:-1], generator.feed(tokens)])


def greedy_reply(model: ModelFile, tokens: Sequence[int]) -> list[int]:
    generator, reply_ids = Generator.from_model(model, len(tokens) + REPLY), list[int]()
    next_logits = generator.feed(tokens)
    while len(reply_ids) < REPLY:
        reply_ids.append(int(next_logits.argmax()))
        next_logits = generator.feed(reply_ids[-1:])
    return reply_ids


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Of probabilities."""
    logits = logits.astype(np.float64)
    return logits - np.logaddexp.reduce(logits, -1, keepdims=True)


def logprob_error(our_logits: np.ndarray, their_logits: np.ndarray) -> float:
    """The largest difference of logarithms of probabilities of their likeliest tokens."""
    a, b = map(log_softmax, (our_logits, their_logits))
    top = np.argsort(-b, -1)[:, :TOP]
    return float(np.abs(np.take_along_axis(a - b, top, -1)).max())


def run_silently(*command: object) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert packtrain([*map(str, command)]) == 0


def peer_logprobs(python: str, tokens: Sequence[int], question: dict[str, Any]) -> np.ndarray:
    """Logarithms of llama.cpp's probabilities at every position."""
    with tempfile.NamedTemporaryFile(suffix=".npy") as scores:
        ask_peer(python, **question, tokens=list(tokens), count=0, scores=scores.name)
        return log_softmax(np.load(scores.name))
