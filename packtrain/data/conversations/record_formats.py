"""Data files of any supported format as conversations and texts, one record at a time.

The fields of the first record determine the format of a file. Yields messages in the form that chat templates take.
It knows no templates and no tokens; InputError names file, row or line, and field.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np

from packtrain.common.errors import InputError
from packtrain.common.text import plural, shortlist
from packtrain.data.conversations import messages as sample_messages
from packtrain.data.conversations.field_meanings import BESIDE, CONTEXT, LABEL, ROW, check
from packtrain.data.conversations.messages import WANTED, Conversation, Message, Pair, new_message
from packtrain.data.text.documents import Piece, Source, read_documents
from packtrain.data.text.field_names import unknown_header
from packtrain.data.text.reading_report import Report
from packtrain.data.text.records import read_records
from packtrain.data.text.text_streams import RECORDS, kind_of


@dataclass(frozen=True, slots=True)
class Plain:
    """A text, all of which is trained on; `checked`: text that spells a control token becomes that token."""

    where: str
    pieces: Iterable[str]
    checked: bool


@dataclass(frozen=True, slots=True)
class Form:
    """A format of records: required and optional fields, and how to parse them."""

    needed: tuple[str, ...]
    allowed: tuple[str, ...]
    make: Callable[[Mapping[str, Any], str], Conversation | Pair | Plain]

    @property
    def name(self) -> str:
        return "/".join(self.needed)


@dataclass(slots=True)
class Reader:
    """The records of a file. Its notes are complete when all records have been read; `report` has the skipped ones."""

    source: Source
    separator: str | None = None
    skip_bad: bool = False
    columns: str | None = None
    form: Form | None = None
    count: int = 0
    opened: int = 0  # conversations that started with the assistant
    hashes: "array[int]" = field(default_factory=lambda: array("q"))  # of records, as they are used
    report: Report = field(init=False)

    def __post_init__(self) -> None:
        self.report = Report(self.source.path, self.skip_bad, columns=self.columns)

    def __iter__(self) -> Iterator[Conversation | Pair | Plain]:
        if kind_of(self.source.path) not in RECORDS:
            yield from self._documents()
            return
        for where, found in read_records(WANTED, self.report):
            try:
                parsed_record = self._parsed(found, where)
            except InputError as error:
                # the whole file is bad, not one record
                if self.form is None and (self.report.header or not self.skip_bad):
                    raise
                self.report.reject(error)
            else:
                self.count += 1
                self.opened += isinstance(parsed_record, Conversation) and parsed_record.opened
                yield parsed_record

    def reject(self, error: InputError) -> None:
        """Reject the last record, which cannot be used after all."""
        self.report.reject(error)
        self.count -= 1

    def _parsed(self, found: Any, where: str) -> Conversation | Pair | Plain:
        record = sample_messages.an_object(found, where)
        if self.form is None:
            self.form = _form_of(record, where, self.report)
        self._check(record, where, self.form)
        used = [record.get(name) for name in (*self.form.needed, *self.form.allowed)]
        made = self.form.make(record, where)
        self.hashes.append(hash(repr(used)))
        return made

    def _check(self, record: Mapping[str, Any], where: str, form: Form) -> None:
        missing = [name for name in form.needed if name not in record]
        if missing:
            raise InputError(
                f"{where} has no field {missing[0]}",
                f"all records of a file must be like its first, with {' and '.join(form.needed)}",
            )
        known, unused = {*form.needed, *form.allowed}, self.report.unused
        others = {name: record[name] for name in record.keys() - known}
        names = {name.strip().lower() for name in self.report.names}
        is_guessed = not (self.report.given or names >= {"prompt", *form.needed})
        beside = (BESIDE if "prompt" in known else CONTEXT) if is_guessed else {}
        check(others, where, ROW | ({} if form.needed == ("text",) else LABEL | beside))
        unused.update(others)
        for name in known - {"tools", "history"}:
            for message in sample_messages.listed(record.get(name)):
                if isinstance(message, dict):
                    unused.update(message.keys() - sample_messages.MESSAGE_FIELDS)

    def _documents(self) -> Iterator[Plain]:
        pieces = iter(read_documents([self.source], self.separator, [self.report]))
        for piece in pieces:
            self.count += 1
            yield Plain(f"{self.source.path}: document {self.count}", _rest(piece, pieces), False)

    @property
    def notes(self) -> list[str]:
        """Messages about the file: its format, unused fields, and what was changed or left out."""
        name = self.source.path.name
        kind = f"of {self.form.name}" if self.form else "of text"
        found = f"{name}: {plural(self.count, 'record' if self.form else 'document')} {kind}"
        if self.report.unused:
            found += f"; not used: {shortlist(sorted(self.report.unused))}"
        same = len(self.hashes) - len(np.unique(self.hashes))
        twice = [f"{name}: {plural(same, 'record')} repeat another, word for word"] if same else []
        begun = plural(self.opened, "conversation")
        opened = [f"{name}: {begun} started with the assistant; that turn is dropped"]
        return [found, *(opened if self.opened else ()), *self.report.notes, *twice]


def _rest(piece: Piece, pieces: Iterator[Piece]) -> Iterator[str]:
    """The texts of one document, from the stream of all pieces."""
    yield piece.text
    while not piece.ends:
        piece = next(pieces)
        yield piece.text


# ---- forms


def _form_of(record: Mapping[str, Any], where: str, report: Report) -> Form:
    for form in (PAIR, *FORMS):
        if set(form.needed) <= set(record):
            return form
    if report.header:
        raise unknown_header(report.header, report.names, ["prompt", "completion"], record)
    fields = f"the fields {shortlist(record)}" if record else "no fields"
    raise InputError(f"{where} has {fields}", f"{WANTED}; --columns NAME=FIELD renames others")


def _messages(record: Mapping[str, Any], where: str) -> Conversation:
    turns = record["messages"] if "messages" in record else record["conversations"]
    messages = sample_messages.read_messages(
        turns, where, "messages" if "messages" in record else "conversations"
    )
    system = record.get("system")
    if system:
        messages.insert(0, new_message("system", system, f"{where}: system"))
    return sample_messages.conversation(where, messages, record.get("tools"))


def _question(record: Mapping[str, Any], where: str) -> Conversation:
    """A question and an answer, texts or lists of messages, perhaps after earlier turns."""
    messages: list[Message] = []
    if record.get("system"):
        messages.append(new_message("system", record["system"], f"{where}: system"))
    history = record.get("history")
    for i, turns in enumerate(
        sample_messages.listed(sample_messages.parsed(history, f"{where}: history"))
    ):
        at = f"{where}: history[{i}]"
        if not isinstance(turns, list) or len(turns) != 2:
            raise InputError(f"{at} must be a pair of texts: the user's and the assistant's")
        messages += [new_message("user", turns[0], at), new_message("assistant", turns[1], at)]
    for name, role in (("prompt", "user"), ("completion", "assistant")):
        given = record[name]
        if isinstance(given, list):
            messages += sample_messages.read_messages(given, where, name)
        else:
            messages.append(new_message(role, given, f"{where}: {name}"))
    return sample_messages.conversation(where, messages, record.get("tools"))


def _preference(record: Mapping[str, Any], where: str) -> Pair:
    """Answers as texts or messages; without a list of messages for a prompt, lists of messages begin with it."""
    answers = {name: _answer(record[name], where, name) for name in ("chosen", "rejected")}
    texts = [name for name in answers if isinstance(record[name], str)]
    field = next((name for name in PROMPTS if record.get(name)), None)
    if isinstance(record.get(field or ""), list):
        prompt = sample_messages.read_messages(record[field or ""], where, field or "")
    elif texts and field is None:
        raise InputError(f"{where}: {texts[0]} is a text", f"it needs a field {PROMPTS[0]}")
    elif texts:
        prompt = [new_message("user", record[field or ""], f"{where}: {field}")]
    else:
        both = takewhile(lambda pair: pair[0] == pair[1], zip(*answers.values(), strict=False))
        prompt = [message for message, _ in both]
        while prompt and prompt[-1]["role"] == "assistant":
            prompt.pop()
        answers = {name: messages[len(prompt) :] for name, messages in answers.items()}
    if record.get("system"):
        prompt.insert(0, new_message("system", record["system"], f"{where}: system"))
    return sample_messages.pair(where, prompt, answers, record.get("tools"))


def _answer(given: Any, where: str, name: str) -> list[Message]:
    given = [given] if isinstance(given, dict) else given
    if isinstance(given, list):
        return sample_messages.read_messages(given, where, name)
    return [new_message("assistant", given, f"{where}: {name}")]


def _plain(record: Mapping[str, Any], where: str) -> Plain:
    return Plain(where, (sample_messages.worded(record["text"], f"{where}: text"),), True)


PROMPTS = ("prompt", "messages", "conversations")
PAIR = Form(("chosen", "rejected"), (*PROMPTS, "tools", "system"), _preference)
FORMS = (
    Form(("messages",), ("tools", "system"), _messages),
    Form(("conversations",), ("tools", "system"), _messages),
    Form(("prompt", "completion"), ("tools", "system", "history"), _question),
    Form(("text",), (), _plain),
)
