"""eval --choices: lm-eval's accuracies, against log-probabilities of whole texts; and rows that are refused."""

import json
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain.cli.main import main
from packtrain.common.errors import InputError
from packtrain.models.model_file import open_model
from tests.architectures import random_model

ROWS = [
    {"question": "the cat ", "choices": ["a", "the bad hat", "deed"], "answer": 0},
    {"question": "a bad head", "choices": ["face", "of", "the the"], "answer": "B"},
    {"question": "the face", "choices": ["of a cafe", "hat"], "answer": "hat"},
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    random_model(tmp_path / "m.gguf", "llama")
    return tmp_path / "m.gguf"


def write_rows(folder: Path, rows: list[dict]) -> Path:
    (folder / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "q.jsonl"


def expected_logprobs(model: Path, question: str, choice: str) -> float:
    """The sum over the choice's tokens, of the model's logits on the whole text."""
    tokenizer = open_model(model).tokenizer()
    num_context = len(tokenizer.encode(question.rstrip(), eos=False))
    ids = tokenizer.encode(f"{question} {choice}", eos=False)
    context = pt.Context(model, cells=128, cache="f32")
    logits = np.concatenate([context.decode([id]) for id in ids])
    logprobs = logits - np.log(np.exp(logits.astype(float)).sum(axis=1, keepdims=True))
    return sum(logprobs[i - 1, ids[i]] for i in range(num_context, len(ids)))


def test_accuracies_are_those_of_whole_texts(model, tmp_path, capsys):
    path = write_rows(tmp_path, ROWS)
    (scores,) = pt.evaluate(model, choices=path).choices.values()
    answers, is_right, is_right_normalized = (0, 1, 1), [], []
    for row, answer, logprobs in zip(ROWS, answers, scores.logprobs, strict=True):
        expected = [expected_logprobs(model, row["question"], x) for x in row["choices"]]
        assert logprobs == pytest.approx(expected, abs=1e-4)
        is_right.append(np.argmax(expected) == answer)
        lengths = [len(choice) for choice in row["choices"]]
        is_right_normalized.append(np.argmax(np.divide(expected, lengths)) == answer)
    assert scores.is_right.tolist() == is_right
    assert scores.is_right_normalized.tolist() == is_right_normalized
    assert scores.acc.error == pytest.approx(np.std(is_right, ddof=1) / len(is_right) ** 0.5)
    assert main(["eval", str(model), "--choices", str(path)]) == 0
    assert f"acc {scores.acc}, acc_norm {scores.acc_norm}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "row, answer",
    [
        ({"q": "the", "choices": ["a", "b"], "gold": 1}, 1),
        ({"prompt": "the", "options": ["a", "b"], "label": "1"}, 1),
        ({"question": "the", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2"}, 1),
        ({"ctx": "the", "endings": ["a", "b"], "label": "0"}, 0),
        ({"question": "the", "choices": '["a", "b"]', "answer": "A"}, 0),
    ],
)  # fmt: skip
def test_forms_of_rows(model, tmp_path, row, answer):
    (scores,) = pt.evaluate(model, choices=write_rows(tmp_path, [row])).choices.values()
    assert scores.is_right[0] == (scores.logprobs[0].argmax() == answer)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"choices": ["a"]}, "choices must be a list of two texts or more"),
        ({"answer": 2}, "the answer is 2; it must be an index from 0 to 1"),
        ({"answer": True}, "the answer is True"),
        ({"answer": None}, "none of the columns completion, answer"),
        (
            {"question": "the cat " * 99},
            r"question and choice have \d+ tokens; the context has 128",
        ),
        ({"question": 5}, "the question must be a text"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_row(model, tmp_path, change, message):
    good_row = {"question": "the", "choices": ["a", "b"], "answer": 0}
    path = write_rows(tmp_path, [good_row, good_row | change])
    with pytest.raises(InputError, match=rf"q\.jsonl: line 2.*{message}"):
        pt.evaluate(model, choices=path)
    (scores,) = pt.evaluate(model, choices=path, skip_bad=True).choices.values()
    assert len(scores.is_right) == 1


def test_choices_are_measured_without_a_text(model, tmp_path):
    path = write_rows(tmp_path, ROWS)
    with pytest.raises(InputError, match="has no effect with"):
        pt.evaluate(model, path, choices=path)
    with pytest.raises(InputError, match="data must be given"):
        pt.evaluate(model)
