"""Models side by side on conversations that none was trained on: losses, right answers, wins, what was forgotten."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import compress
from pathlib import Path
from typing import Any

from packtrain.common.errors import InputError, Interrupted
from packtrain.common.events import Events
from packtrain.common.options import COLUMNS, option, positional, required
from packtrain.common.text import plural
from packtrain.data.conversations.messages import AnswerPair, Conversation, Message
from packtrain.data.conversations.record_formats import PlainText, RecordReader
from packtrain.data.text.documents import find_sources
from packtrain.data.text.text_streams import DATA_SUFFIXES
from packtrain.training.model_loss import MeanEstimate
from packtrain.training.run_settings import CHAT_TEMPLATE, SKIP_BAD_HELP
from packtrain.workflows import tool_call_scores
from packtrain.workflows.chat_session import ChatSession, ChatSettings, ConversationTooLong
from packtrain.workflows.eval_data import EvaluateSettings, find_eval_file
from packtrain.workflows.evaluation import EvalResult, evaluate
from packtrain.workflows.judge_command import judge_answers, parse_command
from packtrain.workflows.tool_call_scores import ToolCall, ToolCallReader, ToolCallScore

MATCH, SHORTER, LONGER = WIN_RULES = ("match", "shorter", "longer")
UNMATCHED_MESSAGE = (
    "--pattern {pattern} matches no answer of the data: an answer is right only if it equals the data's answer;"
    " --has REGEX counts answers that have a style"
)
FINAL = r"####\s*(.+)"
IGNORED_CHARS = re.compile(r"[\s,$]+|\.$")  # characters that do not count when answers are compared


@dataclass(frozen=True)
class CompareSettings:
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
        " number, true or false for each", metavar="COMMAND",
    )  # fmt: skip
    rule: str = option(
        MATCH, "which answer wins: the one with the right final answer, the shorter or the longer one",
        choices=WIN_RULES,
    )  # fmt: skip
    kl: bool = option(False, "show the KL divergence of predictions from the first model's")
    text: Path | None = option(
        None, "another text: its perplexity shows what was forgotten", metavar="FILE"
    )
    count: int = option(
        100, "most questions: conversations, with tools each turn of the assistant", min_value=1
    )
    n_predict: int = option(256, "most tokens of an answer", flags="-n", min_value=1)
    temp: float = option(
        0.0, "temperature of the answers; 0: the likeliest, 0.8: as `chat` answers", min_value=0
    )
    ctx: int | None = option(
        None, "context length in tokens (default: as `chat`)", flags="-c", min_value=3
    )
    chat_template: str | None = option(None, CHAT_TEMPLATE, metavar="NAME|FILE|TEXT")
    skip_bad: bool = option(False, SKIP_BAD_HELP)
    columns: str | None = option(None, COLUMNS, metavar="NAME=FIELD,…")
    show: int = option(3, "answers to print side by side", min_value=0)
    json: Path | None = option(None, "write figures and answers as JSON", metavar="FILE")
    html: Path | None = option(None, "write all answers as a page", metavar="FILE")


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation up to an answer, and the data's answer, the chosen one of a pair.

    tools  those of the conversation, in OpenAI's form
    calls  the data's tool calls here, beside the words of `answer`
    """

    messages: list[Message]
    answer: str
    pair: bool = False
    tools: list[Any] | None = None
    calls: Sequence[ToolCall] = ()

    @property
    def text(self) -> str:
        """The question alone: the last message."""
        return str(self.messages[-1]["content"])


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """The text of an answer, and a comparison of its tool calls with the data's; None: the question has no tools."""

    text: str
    calls: ToolCallScore | None = None


@dataclass(frozen=True, slots=True)
class ComparedModel:
    """Measurements of a model.

    loss     nats per token of the assistant's words; None for pairs of answers
    kl       mean KL divergence from the first model's predictions, nats; None without --kl
    answers  to each question
    right    whether each answer is right: its final answer, or its tool calls, are those of the data
    wins     answers that beat the first model's by --rule; `losses`: that lose; others are ties
    text     loss on --text, nats per token; None without it
    has      whether each answer matches --has; empty without it
    scores   of each answer by --judge; empty without it
    calls    tool calls of the answers to conversations with tools, beside the data's
    """

    name: str
    loss: MeanEstimate | None
    answers: list[str]
    right: list[bool]
    wins: int
    losses: int
    text: MeanEstimate | None
    has: Sequence[bool] = ()
    scores: Sequence[float] = ()
    calls: Sequence[ToolCallScore] = ()
    kl: MeanEstimate | None = None

    @property
    def words(self) -> float:
        """Mean number of words of an answer."""
        return sum(len(answer.split()) for answer in self.answers) / len(self.answers)


@dataclass(frozen=True, slots=True, repr=False)
class ComparisonResult:
    """Measurements of all models, the base's first; `same`: they tokenize alike, so that losses can be compared."""

    questions: list[Question]
    subjects: list[ComparedModel]
    same: bool

    def __repr__(self) -> str:
        scores = (f"{Path(s.name).name} {sum(s.right)} right" for s in self.subjects)
        return f"ComparisonResult({plural(len(self.questions), 'question')}: {', '.join(scores)})"


def compare(settings: CompareSettings, events: Events) -> ComparisonResult:
    """Measure models, let them answer questions, and return the figures. Raises InputError, DoesNotFit, Interrupted."""
    final = _compile_pattern("--pattern", settings.pattern)
    style = None if settings.has is None else _compile_pattern("--has", settings.has)
    judge_command = None if settings.judge is None else parse_command(settings.judge)
    if len(settings.model) < 2:
        raise InputError("the models: name at least two, the base first")
    questions = _load_questions(settings)
    losses = None if questions[0].pair else _measure_data(settings, events)
    texts = None
    if settings.text is not None:
        texts = evaluate(EvaluateSettings(settings.model, settings.text), events)
    model_answers = [list(_answers(settings, path, questions, events)) for path in settings.model]
    has_room = [None not in answers for answers in zip(*model_answers, strict=True)]
    questions = list(compress(questions, has_room))
    _report_omitted(settings, has_room, events)
    references, subjects = [final_answer(final, q.answer) for q in questions], list[ComparedModel]()
    is_matched = any(q.calls or final.search(q.answer) for q in questions)
    if settings.rule == MATCH and not is_matched:
        events.message(UNMATCHED_MESSAGE.format(pattern=settings.pattern))
    answers_by_model = [
        [a for a in compress(answers, has_room) if a is not None] for answers in model_answers
    ]
    texts_by_model = [[answer.text for answer in answers] for answers in answers_by_model]
    scores = _judge_scores(settings, judge_command, questions, texts_by_model)
    for number, path in enumerate(settings.model):
        answers, calls = texts_by_model[number], [a.calls for a in answers_by_model[number]]
        answer_triples = zip(answers, references, calls, strict=True)
        is_right = [_is_right(final_answer(final, a), r, call) for a, r, call in answer_triples]
        first = subjects[0] if subjects else None
        win_signs = [] if first is None else _win_signs(settings.rule, first, answers, is_right)
        data_loss, text_loss = (
            None if measured is None else measured.loss(str(path)) for measured in (losses, texts)
        )
        counts = win_signs.count(1), win_signs.count(-1)
        has = [] if style is None else [style.search(answer) is not None for answer in answers]
        figures = data_loss, answers, is_right, *counts, text_loss, has, scores[number]
        mean_kl = losses.mean_kl(str(path)) if losses else None
        subjects.append(ComparedModel(str(path), *figures, [*filter(None, calls)], mean_kl))
    return ComparisonResult(questions, subjects, losses is None or losses.same)


def _measure_data(settings: CompareSettings, events: Events) -> EvalResult:
    """Return the models' losses on the data, and with --kl their divergences from the first."""
    names = {f.name for f in fields(EvaluateSettings)} & vars(settings).keys()
    options = {name: getattr(settings, name) for name in names}
    options["kl_base"] = settings.model[0] if settings.kl else None
    return evaluate(EvaluateSettings(**options), events)


def _compile_pattern(flag: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InputError(f"{flag} {pattern}: {error}; it must be a regular expression") from None


def _judge_scores(
    settings: CompareSettings, judge_command: Sequence[str] | None, questions: Sequence[Question],
    answers_by_model: Sequence[Sequence[str]],
) -> list[list[float]]:  # fmt: skip
    """Return the judge's scores, a list for each model with a score for each question, from one call of the judge;
    empty lists without a judge. Raises InputError."""
    if judge_command is None:
        return [[] for _ in answers_by_model]
    rows = [
        {"question": q.text, "reference": q.answer, "answer": answer, "model": str(path)}
        for path, answers in zip(settings.model, answers_by_model, strict=True)
        for q, answer in zip(questions, answers, strict=True)
    ]
    flat_scores = judge_answers(judge_command, rows)
    return [flat_scores[at : at + len(questions)] for at in range(0, len(rows), len(questions))]


def final_answer(pattern: re.Pattern[str], answer: str) -> str:
    """Return the answer's last match of `pattern`, else all, in lower case without spaces, commas, $ and a last dot."""
    matches = [match[match.lastindex or 0] for match in pattern.finditer(answer)]
    return IGNORED_CHARS.sub("", (matches[-1] if matches else answer).strip().casefold())


def _is_right(final: str, reference: str, calls: ToolCallScore | None) -> bool:
    """Return whether an answer is right: it makes the data's calls, or no call and has `reference` as final answer."""
    if calls is not None and (calls.is_expected or not calls.has_arguments):
        return calls.has_arguments
    return final == reference


def _win_signs(
    win_rule: str, base_model: ComparedModel, answers: Sequence[str], is_right: Sequence[bool]
) -> list[int]:
    """Return for each answer 1 if it beats the first model's by `win_rule` (MATCH or length), -1 if it loses, or 0."""
    if win_rule == MATCH:
        return [int(a) - int(b) for a, b in zip(is_right, base_model.right, strict=True)]
    length_signs = [
        (len(base_answer) > len(model_answer)) - (len(base_answer) < len(model_answer))
        for model_answer, base_answer in zip(answers, base_model.answers, strict=True)
    ]
    return length_signs if win_rule == SHORTER else [-length_sign for length_sign in length_signs]


# ---- questions and answers -----------------------------------------------------------------------------------


def _load_questions(settings: CompareSettings) -> list[Question]:
    questions = list[Question]()
    data_path, _ = find_eval_file(settings.data, None)
    for source in find_sources(data_path, DATA_SUFFIXES):
        for record in RecordReader(source, skip_bad=settings.skip_bad, columns=settings.columns):
            if len(questions) < settings.count:
                questions += _make_questions(record)
    questions = questions[: settings.count]
    if not questions:
        raise InputError(f"--data: {data_path} holds no conversations; at least one is needed")
    if settings.kl and questions[0].pair:
        raise InputError(f"--kl needs conversations; {data_path} has pairs of answers")
    return questions


def _make_questions(data_record: Conversation | AnswerPair | PlainText) -> list[Question]:
    """Return the questions of a record: its last turn; of a conversation with tools each turn of the assistant."""
    if isinstance(data_record, PlainText):
        advice = "only conversations have answers to compare"
        raise InputError(f"{data_record.location} is a text", advice)
    is_pair = isinstance(data_record, AnswerPair)
    conversation = data_record.chosen if isinstance(data_record, AnswerPair) else data_record
    messages, tools = conversation.messages, conversation.tools
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("weight") != 0]
    text_of, calls_of = tool_call_scores.answer_text, tool_call_scores.calls_of
    return [
        Question(messages[:i], text_of(messages[i]), is_pair, tools, calls_of(messages[i]))
        for i in (turns if tools and not is_pair else [len(messages) - 1])
    ]


def _report_omitted(settings: CompareSettings, has_room: Sequence[bool], events: Events) -> None:
    """Report how many questions (False in `has_room`) are too long for a model. Raises InputError if all are."""
    count = has_room.count(False)
    if count == len(has_room):
        raise InputError(
            f"--data: no conversation of {settings.data} leaves room for an answer in the context",
            "--ctx makes room for more",
        )
    if count:
        events.message(
            f"{plural(count, 'conversation')} of {len(has_room)} left out: no room for an answer in the context (--ctx)"
        )


def _answers(
    settings: CompareSettings, path: Path, questions: Sequence[Question], events: Events
) -> Iterator[ModelAnswer | None]:
    """Yield the model's answer to each question; None where it is too long for the context. Raises Interrupted."""
    chat_settings = ChatSettings(
        path, temp=settings.temp, seed=0, ctx=settings.ctx, n_predict=settings.n_predict,
        chat_template=settings.chat_template,
    )  # fmt: skip
    chat_session = ChatSession(chat_settings, Events())
    reader = chat_session.tool_call_reader() if any(q.tools for q in questions) else None
    with (
        events.counting(f"answers of {path.name}", "question") as report_progress,
        events.stopping() as stopped,
    ):
        for number, question in enumerate(questions, 1):
            if stopped():
                raise Interrupted(f"stopped after {number - 1} of {len(questions)} answers")
            try:
                yield _answer(chat_session, reader if question.tools else None, question)
            except ConversationTooLong:
                yield None
            report_progress(number, len(questions))


def _answer(
    chat_session: ChatSession, reader: ToolCallReader | None, question: Question
) -> ModelAnswer:
    """Return the model's answer to a question, with tools if there is a reader. Raises ConversationTooLong."""
    if reader is None:
        chat_session.messages = question.messages[:-1]
        return ModelAnswer(chat_session.answer(question.text).text.strip())
    conversation = Conversation("the question", question.messages, question.tools)
    reply = chat_session.reply(reader.prompt(conversation))
    text = chat_session.tokenizer.decode(reply.ids, special=True).strip()
    calls = reader.calls(text, conversation)
    return ModelAnswer(text, tool_call_scores.score_calls(calls, question.calls))
