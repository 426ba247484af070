"""Multiple choice, scored as lm-eval does: each choice follows its question after a space; the likeliest one wins."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.files import require_existing
from packtrain.data.conversations.messages import check_object, parse_if_json
from packtrain.data.text.field_names import QUESTION_NAMES
from packtrain.data.text.reading_report import ReadingReport
from packtrain.data.text.records import read_records
from packtrain.data.text.token_files import TokenizedSamples
from packtrain.data.tokenizer import Tokenizer
from packtrain.planner.budget import ReportFunction
from packtrain.training.model_loss import MeanEstimate

QUESTION_COLUMNS = *QUESTION_NAMES, "q", "ctx"
CHOICE_COLUMNS = "choices", "options", "endings"
ANSWER_COLUMNS = "completion", "answer", "answerkey", "label", "gold", "target"
EXAMPLE = '{"question": "…", "choices": ["…", "…"], "answer": 0}'


@dataclass(frozen=True, slots=True)
class ChoiceQuestion:
    """A question; `ids`: the tokens (T,) of question and choice, for each choice, which begins at index `start`."""

    choices: list[str]
    answer: int
    ids: list[np.ndarray]
    start: int


@dataclass(frozen=True, slots=True)
class ChoiceScores:
    """Scores of a model: log-probabilities of the choices of each question, and whether the answer's is the largest.

    is_right             (N,) bool  by the sum over the choice's tokens: lm-eval's acc
    is_right_normalized  (N,) bool  by the sum divided by the choice's characters: lm-eval's acc_norm
    """

    logprobs: list[np.ndarray]
    is_right: np.ndarray
    is_right_normalized: np.ndarray

    @property
    def acc(self) -> MeanEstimate:
        return MeanEstimate.of(self.is_right)

    @property
    def acc_norm(self) -> MeanEstimate:
        return MeanEstimate.of(self.is_right_normalized)


def score_choices(questions: Sequence[ChoiceQuestion], losses: np.ndarray) -> ChoiceScores:
    """Return scores of questions from the losses (N,) of the tokens of all choices, one question after the other."""
    counts = [len(x) - q.start for q in questions for x in q.ids]
    sums = -np.add.reduceat(losses.astype(np.float64), np.cumsum([0, *counts[:-1]]))
    logprobs = np.split(sums, np.cumsum([len(q.choices) for q in questions[:-1]]))
    pairs = [*zip(questions, logprobs, strict=True)]
    normalized = ((q, scores / [*map(len, q.choices)]) for q, scores in pairs)
    is_right, is_right_normalized = (
        np.array([scores.argmax() == q.answer for q, scores in x]) for x in (pairs, normalized)
    )
    return ChoiceScores(logprobs, is_right, is_right_normalized)


def choice_samples(questions: Sequence[ChoiceQuestion]) -> TokenizedSamples:
    """Return a sample for each choice, whose own tokens are targets."""
    choices = [(x, q.start) for q in questions for x in q.ids]
    weights = [(np.arange(len(x)) >= start).astype(np.uint8) for x, start in choices]
    ids, sample_starts = [x for x, _ in choices], np.cumsum([0, *(len(x) for x, _ in choices[:-1])])
    return TokenizedSamples(np.concatenate(ids), np.concatenate(weights), sample_starts)


def read_questions(
    path: Path, tokenizer: Tokenizer, max_tokens: int, skip_bad: bool, columns: str | None, report: ReportFunction
) -> list[ChoiceQuestion]:  # fmt: skip
    """Read questions of at most `max_tokens` tokens with each choice; skip_bad drops bad rows. Raises InputError."""
    require_existing(path, "--choices")
    reading_report = ReadingReport(path, skip_bad, columns=columns)
    questions = list[ChoiceQuestion]()
    for location, record in read_records(EXAMPLE, reading_report):
        try:
            question = _parse_question(check_object(record, location), location, tokenizer)
            longest = max(map(len, question.ids)) - 1
            if longest > max_tokens:
                fact = f"{location}: question and choice have {longest:,} tokens"
                raise InputError(fact, f"the context has {max_tokens:,}; --ctx changes that")
            questions.append(question)
        except InputError as error:
            reading_report.reject(error)
    for note in reading_report.notes:
        report(note)
    if not questions:
        raise InputError(f"--choices: {path} has no questions", f"a row is like {EXAMPLE}")
    return questions


def _parse_question(record: dict[str, Any], location: str, tokenizer: Tokenizer) -> ChoiceQuestion:
    text = _column(record, ("prompt", *QUESTION_COLUMNS), location)
    choices, labels = _column(record, CHOICE_COLUMNS, location), list[Any]()
    choices = parse_if_json(choices, f"{location}: choices")
    if isinstance(choices, dict):  # as in ARC: texts beside labels
        labels, choices = choices.get("label") or [], choices.get("text")
    is_list = isinstance(choices, list) and len(choices) > 1
    if not is_list or not all(isinstance(choice, str) and choice for choice in choices):
        raise InputError(f"{location}: choices must be a list of two texts or more", EXAMPLE)
    if not isinstance(text, str):
        raise InputError(f"{location}: the question must be a text", EXAMPLE)
    answer = _answer_index(_column(record, ANSWER_COLUMNS, location), choices, labels, location)
    context = text.rstrip()
    num_context = len(tokenizer.encode(context, eos=False))
    ids = [
        np.array(tokenizer.encode(f"{context}{text[len(context) :]} {choice}", eos=False), np.int32)
        for choice in choices
    ]
    if not 0 < num_context < min(map(len, ids)):
        raise InputError(f"{location}: the question or a choice has no tokens", EXAMPLE)
    return ChoiceQuestion(choices, answer, ids, num_context)


def _column(record: dict[str, Any], names: Sequence[str], location: str) -> Any:
    """Return a row's value under the first of these names in it. Raises InputError, at `location`, if none is there."""
    for name in names:
        if record.get(name) is not None:
            return record[name]
    raise InputError(f"{location} has none of the columns {', '.join(names)}", EXAMPLE)


def _answer_index(answer: Any, choices: list[str], labels: list[Any], location: str) -> int:
    """Return the index of the answer, which is a choice's text, label, letter or index from 0 on. Raises InputError."""
    letters, numbers = zip(*((chr(ord("A") + i), str(i)) for i in range(len(choices))), strict=True)
    is_index = isinstance(answer, int) and not isinstance(answer, bool)
    for names in (numbers,) if is_index else (choices, labels, letters, numbers):
        if names.count(str(answer) if is_index else answer) == 1:
            return names.index(str(answer) if is_index else answer)
    raise InputError(
        f"{location}: the answer is {answer!r}",
        f"it must be an index from 0 to {len(choices) - 1}, a letter from A to {letters[-1]}, or a choice's text",
    )
