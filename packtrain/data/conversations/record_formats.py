"""Data files of any supported format as conversations and texts, one record at a time.

The fields of the first record determine the format of a file. Yields messages in the form that chat templates take.
This module knows no templates and no tokens; InputError names file, row or line, and field."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.text import plural, shortlist
from packtrain.data.conversations import field_meanings
from packtrain.data.conversations import messages as sample_messages
from packtrain.data.conversations.field_meanings import CONTEXT_TABLE, LABEL, ROW_TABLE, check
from packtrain.data.conversations.messages import AnswerPair, Conversation, Message, new_message
from packtrain.data.text.documents import SourceFile, TextPiece, read_documents, valid_text
from packtrain.data.text.field_names import unknown_header
from packtrain.data.text.reading_report import ReadingReport
from packtrain.data.text.records import read_records
from packtrain.data.text.text_streams import RECORDS, suffix_of


@dataclass(frozen=True, slots=True)
class PlainText:
    """A text whose tokens are all trained on; `parse_special`: text that spells a control token becomes that token."""

    location: str
    pieces: Iterable[str]
    parse_special: bool


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """A format of records: required fields, other fields that are read, and how to parse a record at a location."""

    needed: tuple[str, ...]
    allowed: tuple[str, ...]
    parse_record: Callable[[Mapping[str, Any], str], Conversation | AnswerPair | PlainText]

    @property
    def name(self) -> str:
        return "/".join(self.needed)


@dataclass(slots=True)
class RecordReader:
    """Reads the records of a file; when all are read, `notes` are complete and `report` has the skipped ones."""

    source: SourceFile
    separator: str | None = None
    skip_bad: bool = False
    columns: str | None = None
    form: RecordFormat | None = None
    count: int = 0
    num_opened: int = 0  # conversations that started with the assistant
    hashes: "array[int]" = field(default_factory=lambda: array("q"))  # of records' used fields
    report: ReadingReport = field(init=False)

    def __post_init__(self) -> None:
        self.report = ReadingReport(self.source.path, self.skip_bad, columns=self.columns)

    def __iter__(self) -> Iterator[Conversation | AnswerPair | PlainText]:
        if suffix_of(self.source.path) not in RECORDS:
            yield from self._read_texts()
            return
        for location, raw_record in read_records(sample_messages.RECORD_ADVICE, self.report):
            try:
                parsed_record = self._parsed(raw_record, location)
            except InputError as error:
                # the whole file is bad, not just one record
                if self.form is None and (self.report.header or not self.skip_bad):
                    raise
                self.report.reject(error)
            else:
                self.count += 1
                self.num_opened += isinstance(parsed_record, Conversation) and parsed_record.opened
                yield parsed_record

    def reject(self, error: InputError) -> None:
        """Count the last record as bad, no longer as read; without --skip-bad raise the error."""
        self.report.reject(error)
        self.count -= 1

    def _parsed(self, raw_record: Any, location: str) -> Conversation | AnswerPair | PlainText:
        """Parse a record by the file's format, which the first record determines. Raises InputError."""
        record = sample_messages.check_object(raw_record, location)
        if self.form is None:
            self.form = _detect_format(record, location, self.report)
        self._check_fields(record, location, self.form)
        used_values = [record.get(name) for name in (*self.form.needed, *self.form.allowed)]
        parsed_record = self.form.parse_record(record, location)
        self.hashes.append(hash(repr(used_values)))
        return parsed_record

    def _check_fields(self, record: Mapping[str, Any], location: str, form: RecordFormat) -> None:
        """Raise InputError for fields that `form` misses, and unused ones that other tools honour; report others."""
        missing_fields = [name for name in form.needed if name not in record]
        if missing_fields:
            raise InputError(
                f"{location} has no field {missing_fields[0]}",
                f"all records of a file must be like its first, with {' and '.join(form.needed)}",
            )
        known_fields, unused_fields = {*form.needed, *form.allowed}, self.report.unused_columns
        unknown_values = {name: record[name] for name in record.keys() - known_fields}
        column_names = {name.strip().lower() for name in self.report.column_names}
        is_guessed = not (self.report.requested_fields or column_names >= {"prompt", *form.needed})
        meaning_table = ROW_TABLE
        if form.needed != ("text",):
            meaning_table = meaning_table | LABEL
            if is_guessed:
                has_prompt = "prompt" in known_fields
                meaning_table |= field_meanings.OTHER_FIELDS_TABLE if has_prompt else CONTEXT_TABLE
        check(unknown_values, location, meaning_table)
        unused_fields.update(unknown_values)
        for name in known_fields - {"tools", "history"}:
            messages = record.get(name)
            for message in messages if isinstance(messages, list) else ():
                if isinstance(message, dict):
                    unused_fields.update(message.keys() - sample_messages.MESSAGE_FIELDS)

    def _read_texts(self) -> Iterator[PlainText]:
        pieces = iter(read_documents([self.source], self.separator, [self.report]))
        for piece in pieces:
            self.count += 1
            yield PlainText(
                f"{self.source.path}: document {self.count}", _document_texts(piece, pieces), False
            )

    @property
    def notes(self) -> list[str]:
        """Return messages about the file: its format, unused fields, and what was changed or left out."""
        name = self.source.path.name
        kind = f"of {self.form.name}" if self.form else "of text"
        summary = f"{name}: {plural(self.count, 'record' if self.form else 'document')} {kind}"
        if self.report.unused_columns:
            summary += f"; not used: {shortlist(sorted(self.report.unused_columns))}"
        num_repeated = len(self.hashes) - len(np.unique(self.hashes))
        repeat_note = f"{name}: {plural(num_repeated, 'record')} repeat another, word for word"
        repeat_notes = [repeat_note] if num_repeated else []
        conversations_text = plural(self.num_opened, "conversation")
        opened = [f"{name}: {conversations_text} started with the assistant; that turn is dropped"]
        return [summary, *(opened if self.num_opened else ()), *self.report.notes, *repeat_notes]


def _document_texts(piece: TextPiece, pieces: Iterator[TextPiece]) -> Iterator[str]:
    """Yield the texts of a document whose first piece is `piece`; takes the others from the stream `pieces`."""
    yield piece.text
    while not piece.is_last:
        piece = next(pieces)
        yield piece.text


# ---- formats


def _detect_format(record: Mapping[str, Any], location: str, report: ReadingReport) -> RecordFormat:
    for record_format in (PAIR_FORMAT, *RECORD_FORMATS):
        if set(record_format.needed) <= set(record):
            return record_format
    if report.header:
        raise unknown_header(report.header, report.column_names, ["prompt", "completion"], record)
    fields_text = f"the fields {shortlist(record)}" if record else "no fields"
    advice = f"{sample_messages.RECORD_ADVICE}; --columns NAME=FIELD renames others"
    raise InputError(f"{location} has {fields_text}", advice)


def _parse_messages(record: Mapping[str, Any], location: str) -> Conversation:
    field = "messages" if "messages" in record else "conversations"
    messages = sample_messages.read_messages(record[field], location, field)
    messages = _system_messages(record, location) + messages
    return sample_messages.make_conversation(location, messages, record.get("tools"))


def _parse_question(record: Mapping[str, Any], location: str) -> Conversation:
    """Parse a question and an answer, texts or lists of messages, perhaps after earlier turns."""
    messages = _system_messages(record, location)
    history = sample_messages.parse_if_json(record.get("history"), f"{location}: history") or []
    if not isinstance(history, list):
        raise InputError(f"{location}: history must be a list of pairs of texts")
    for i, turns in enumerate(history):
        at = f"{location}: history[{i}]"
        if not isinstance(turns, list) or len(turns) != 2:
            raise InputError(f"{at} must be a pair of texts: the user's and the assistant's")
        messages += [new_message("user", turns[0], at), new_message("assistant", turns[1], at)]
    for message in _turns(record, "prompt", location, "user"):  # its answers are context, as in TRL
        messages.append({"weight": 0} | message if message["role"] == "assistant" else message)
    messages += _turns(record, "completion", location, "assistant")
    return sample_messages.make_conversation(location, messages, record.get("tools"))


def _parse_preference(record: Mapping[str, Any], location: str) -> AnswerPair:
    """Parse a pair of answers, texts or messages, and the prompt: a field, or the messages that both begin with."""
    lists = {n: [v] if isinstance(v := record[n], dict) else v for n in ("chosen", "rejected")}
    answers = {name: _turns(lists, name, location, "assistant") for name in lists}
    texts = [name for name in answers if isinstance(record[name], str)]
    field = next((name for name in PROMPTS if record.get(name)), None)
    if field is None and texts:
        raise InputError(f"{location}: {texts[0]} is a text", f"it needs a field {PROMPTS[0]}")
    if field is not None and (texts or isinstance(record[field], list)):
        prompt = _turns(record, field, location, "user")
    else:
        pairs = zip(*answers.values(), strict=False)
        prompt = [message for message, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        while prompt and prompt[-1]["role"] == "assistant":
            prompt.pop()
        answers = {name: messages[len(prompt) :] for name, messages in answers.items()}
    prompt = _system_messages(record, location) + prompt
    return sample_messages.make_pair(location, prompt, answers, record.get("tools"))


def _turns(record: Mapping[str, Any], name: str, location: str, role: str) -> list[Message]:
    """Parse field `name`: a list of messages, or the text of one message with this role."""
    if isinstance(record[name], list):
        return sample_messages.read_messages(record[name], location, name)
    return [new_message(role, record[name], f"{location}: {name}")]


def _system_messages(record: Mapping[str, Any], location: str) -> list[Message]:
    system = record.get("system")
    return [new_message("system", system, f"{location}: system")] if system else []


def _parse_text_record(record: Mapping[str, Any], location: str) -> PlainText:
    text = valid_text(record["text"], f"{location}: text", sample_messages.RECORD_ADVICE)
    if not text.strip():
        raise InputError(f"{location}: text is empty", "it must have words")
    return PlainText(location, (text,), True)


PROMPTS = ("prompt", "messages", "conversations")
PAIR_FORMAT = RecordFormat(("chosen", "rejected"), (*PROMPTS, "tools", "system"), _parse_preference)
# columns of questions and answers are renamed to prompt and completion first: one format instead of six
RECORD_FORMATS = (
    RecordFormat(("messages",), ("tools", "system"), _parse_messages),
    RecordFormat(("conversations",), ("tools", "system"), _parse_messages),
    RecordFormat(("prompt", "completion"), ("tools", "system", "history"), _parse_question),
    RecordFormat(("text",), (), _parse_text_record),
)
