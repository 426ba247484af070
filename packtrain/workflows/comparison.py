"""Models side by side on conversations that none was trained on: losses, right answers, wins, what was forgotten."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import compress
from pathlib import Path

from packtrain.common.errors import InputError, Interrupted
from packtrain.common.events import Events
from packtrain.common.options import COLUMNS, option, positional, required
from packtrain.common.text import plural
from packtrain.data.conversations.messages import Conversation, Message, Pair
from packtrain.data.conversations.record_formats import Plain, Reader
from packtrain.data.text.documents import find_sources
from packtrain.data.text.text_streams import SUFFIXES
from packtrain.training.model_loss import Mean
from packtrain.training.train_settings import CHAT_TEMPLATE, SKIP_BAD
from packtrain.workflows.chat_session import Chat, Talk, TooLong
from packtrain.workflows.evaluation import Evaluate, evaluate, file_to_measure
from packtrain.workflows.judge_command import command_of, judged

MATCH, SHORTER, LONGER = RULES = ("match", "shorter", "longer")
UNMATCHED = (
    "--pattern {pattern} matches no answer of the data: an answer is right only if all of it is the data's;"
    " --has REGEX counts answers that have a style"
)
FINAL = r"####\s*(.+)"
LOOSE = re.compile(r"[\s,$]+|\.$")  # what does not make an answer another one


@dataclass(frozen=True)
class Compare:
    """Compare models on conversations: their losses, and the answers that they write."""

    COMMON = "data has pattern temp judge text count n_predict show html json"

    model: tuple[Path, ...] = positional("the models, GGUF files, the base first")
    data: Path = required(
        "conversations that no model was trained on; of a folder, the test file, else valid, else train"
    )
    pattern: str = option(
        FINAL, "regular expression of the final answer, or its group, in an answer; the last match counts",
        metavar="REGEX",
    )  # fmt: skip
    has: str | None = option(
        None, "regular expression of a style: how many answers match it is counted", metavar="REGEX"
    )
    judge: str | None = option(
        None,
        "command that scores answers: reads lines of JSON with question, reference, answer and model, and prints a"
        " number, true or false for each",
        metavar="COMMAND",
    )
    rule: str = option(
        MATCH, "which answer wins: the one with the right final answer, the shorter or the longer one",
        choices=RULES,
    )  # fmt: skip
    text: Path | None = option(
        None, "another text: its perplexity shows what was forgotten", metavar="FILE"
    )
    count: int = option(100, "most conversations that are answered", least=1)
    n_predict: int = option(256, "most tokens of an answer", flags="-n", least=1)
    temp: float = option(
        0.0, "temperature of the answers; 0: the likeliest, 0.8: as `chat` answers", least=0
    )
    ctx: int | None = option(
        None, "context length in tokens (default: as `chat`)", flags="-c", least=3
    )
    chat_template: str | None = option(None, CHAT_TEMPLATE, metavar="NAME|FILE")
    skip_bad: bool = option(False, SKIP_BAD)
    columns: str | None = option(None, COLUMNS, metavar="NAME=FIELD,…")
    show: int = option(3, "answers to print side by side", least=0)
    json: Path | None = option(
        None, "write figures and answers as JSON to this file", metavar="FILE"
    )
    html: Path | None = option(None, "write all answers as a page", metavar="FILE")


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation up to an answer, and the answer that the data has, of a pair the chosen one."""

    messages: list[Message]
    answer: str
    pair: bool = False

    @property
    def text(self) -> str:
        return str(self.messages[-1]["content"])


@dataclass(frozen=True, slots=True)
class Subject:
    """What was measured of a model.

    loss     nats per token of the assistant's words; None for pairs of answers
    answers  to each question
    right    whether the final answer is that of the data
    wins     against the first model, and losses; others are ties
    text     loss on another text
    has      whether each answer matches --has; empty without it
    scores   of each answer by --judge; empty without it
    """

    name: str
    loss: Mean | None
    answers: list[str]
    right: list[bool]
    wins: int
    losses: int
    text: Mean | None
    has: Sequence[bool] = ()
    scores: Sequence[float] = ()

    @property
    def words(self) -> float:
        """Mean words of an answer."""
        return sum(len(answer.split()) for answer in self.answers) / len(self.answers)


@dataclass(frozen=True, slots=True, repr=False)
class Compared:
    """same  whether all models tokenize the data alike, so that losses can be compared"""

    questions: list[Question]
    subjects: list[Subject]
    same: bool

    def __repr__(self) -> str:
        scores = (f"{Path(s.name).name} {sum(s.right)} right" for s in self.subjects)
        return f"Compared({plural(len(self.questions), 'question')}: {', '.join(scores)})"


def compare(settings: Compare, events: Events) -> Compared:
    """Measure and answer. Raises InputError, DoesNotFit, and Interrupted if it is stopped."""
    final = _compiled("--pattern", settings.pattern)
    style = None if settings.has is None else _compiled("--has", settings.has)
    judge = None if settings.judge is None else command_of(settings.judge)
    if len(settings.model) < 2:
        raise InputError("the models: name at least two, the base first")
    questions = _questions(settings)
    losses = texts = None
    if not questions[0].pair:
        names = {f.name for f in fields(Evaluate)} & vars(settings).keys()
        losses = evaluate(Evaluate(**{name: getattr(settings, name) for name in names}), events)
    if settings.text is not None:
        texts = evaluate(Evaluate(settings.model, settings.text), events)
    model_answers = [list(_answers(settings, path, questions, events)) for path in settings.model]
    fits = [None not in answers for answers in zip(*model_answers, strict=True)]
    questions = list(compress(questions, fits))
    _tell(settings, fits, events)
    references, subjects = [final_answer(final, q.answer) for q in questions], list[Subject]()
    if settings.rule == MATCH and not any(final.search(q.answer) for q in questions):
        events.message(UNMATCHED.format(pattern=settings.pattern))
    answers_of = [
        [a for a in compress(answers, fits) if a is not None] for answers in model_answers
    ]
    scores = _scores(settings, judge, questions, answers_of)
    for path, answers, own_scores in zip(settings.model, answers_of, scores, strict=True):
        right = [
            final_answer(final, answer) == expected
            for answer, expected in zip(answers, references, strict=True)
        ]
        first = subjects[0] if subjects else None
        sides = [] if first is None else _sides(settings.rule, first, answers, right)
        loss, forgot = (
            None if measured is None else measured.loss(str(path)) for measured in (losses, texts)
        )
        wins, lost = sides.count(1), sides.count(-1)
        has = [] if style is None else [style.search(answer) is not None for answer in answers]
        figures = loss, answers, right, wins, lost, forgot, has, own_scores
        subjects.append(Subject(str(path), *figures))
    return Compared(questions, subjects, losses is None or losses.same)


def _compiled(flag: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InputError(f"{flag} {pattern}: {error}; it must be a regular expression") from None


def _scores(
    settings: Compare,
    judge: Sequence[str] | None,
    questions: Sequence[Question],
    answers_of: Sequence[Sequence[str]],
) -> list[list[float]]:
    """The judge's score of each answer, by model; it is called once. Raises InputError."""
    if judge is None:
        return [[] for _ in answers_of]
    rows = [
        {"question": q.text, "reference": q.answer, "answer": answer, "model": str(path)}
        for path, answers in zip(settings.model, answers_of, strict=True)
        for q, answer in zip(questions, answers, strict=True)
    ]
    scores = judged(judge, rows)
    return [scores[at : at + len(questions)] for at in range(0, len(rows), len(questions))]


def final_answer(pattern: re.Pattern[str], answer: str) -> str:
    """The last match, or the whole answer without one; spaces, commas, $ and a last full stop do not count."""
    matches = [match[match.lastindex or 0] for match in pattern.finditer(answer)]
    return LOOSE.sub("", (matches[-1] if matches else answer).strip().casefold())


def _sides(rule: str, first: Subject, answers: Sequence[str], right: Sequence[bool]) -> list[int]:
    """1 where the answer wins against the first model's, -1 where it loses, else 0."""
    if rule == MATCH:
        return [int(a) - int(b) for a, b in zip(right, first.right, strict=True)]
    sizes = [
        (len(theirs) > len(ours)) - (len(theirs) < len(ours))
        for ours, theirs in zip(answers, first.answers, strict=True)
    ]
    return sizes if rule == SHORTER else [-size for size in sizes]


# ---- questions and answers -----------------------------------------------------------------------------------


def _questions(settings: Compare) -> list[Question]:
    questions = list[Question]()
    path, _ = file_to_measure(settings.data, None)
    for source in find_sources(path, SUFFIXES):
        for record in Reader(source, skip_bad=settings.skip_bad, columns=settings.columns):
            if len(questions) < settings.count:
                questions.append(_question(record))
    if not questions:
        raise InputError(f"--data: {path} holds no conversations; at least one is needed")
    return questions


def _question(record: Conversation | Pair | Plain) -> Question:
    if isinstance(record, Plain):
        raise InputError(f"{record.where} is a text", "only conversations have answers to compare")
    conversation = record.chosen if isinstance(record, Pair) else record
    *before, answer = conversation.messages
    return Question(before, answer["content"], isinstance(record, Pair))


def _tell(settings: Compare, fits: Sequence[bool], events: Events) -> None:
    """Say how many questions are too long for a model. Raises InputError if all are."""
    count = fits.count(False)
    if count == len(fits):
        raise InputError(
            f"--data: no conversation of {settings.data} leaves room for an answer in the context",
            "--ctx makes room for more",
        )
    if count:
        events.message(
            f"{plural(count, 'conversation')} of {len(fits)} left out: no room for an answer in the context (--ctx)"
        )


def _answers(
    settings: Compare, path: Path, questions: Sequence[Question], events: Events
) -> Iterator[str | None]:
    """The answers of a model; None to what is too long for it."""
    chat_settings = Chat(
        path, temp=settings.temp, seed=0, ctx=settings.ctx, n_predict=settings.n_predict,
        chat_template=settings.chat_template,
    )  # fmt: skip
    talk = Talk(chat_settings, Events())
    with (
        events.counting(f"answers of {path.name}", "question") as report_progress,
        events.stopping() as stopped,
    ):
        for number, question in enumerate(questions, 1):
            if stopped():
                raise Interrupted(f"stopped after {number - 1} of {len(questions)} answers")
            talk.messages = question.messages[:-1]
            try:
                answer = talk.answer(question.text).text.strip()
            except TooLong:
                answer = None
            yield answer
            report_progress(number, len(questions))
