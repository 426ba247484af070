"""Maps names of columns to the fields that packtrain reads: by --columns, or guessed for common pairs.

Capitals do not count. Columns that become one field are joined, a line break between them."""

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from itertools import product

from packtrain.common.errors import InputError
from packtrain.common.text import shortlist

QUESTION_NAMES = ("prompt", "instruction", "question", "query", "input", "request")
ANSWER_NAMES = ("chosen", "completion", "answer", "response", "output", "reply")
NAME_PAIRS = (*product(QUESTION_NAMES, ANSWER_NAMES), ("user", "assistant"), ("human", "assistant"))
JOINED_NAMES = ("context", "input")  # joined into the prompt, beside another question
CONVERSATION_FIELDS = ("messages", "conversations")
# names of OpenAI, Axolotl, ms-swift
ALIASES = {"functions": "tools", "system_prompt": "system", "rejected_response": "rejected"}
EXTRA_FIELDS = ("system", "history", "tools", "chosen", "rejected")  # beside other fields
FIELDS = ("prompt", "completion", "text", *CONVERSATION_FIELDS, *EXTRA_FIELDS)
QUOTED_NAME = re.compile(r'"(?:[^"]|"")*"')
COLUMN_RULE = re.compile(rf"(\s*{QUOTED_NAME.pattern}\s*=[^,]*|[^,]*),")  # of --columns
MAX_CHARACTERS, SENTENCE_WORDS, SENTENCE_ENDS = 40, 5, (".", "?", "!")  # not a column's name


def parse_columns(text: str | None) -> dict[str, str]:
    """Parse `question=prompt,"answer, short"=completion` to {column: field}. Raises InputError."""
    fields = {}
    for rule in () if text is None else COLUMN_RULE.findall(f"{text},"):
        name, _, field = (word.strip().lower() for word in rule.rpartition("="))
        if QUOTED_NAME.fullmatch(name):
            name = name[1:-1].replace('""', '"').strip()
        if not name or field not in FIELDS:
            raise InputError(
                f"--columns {text}: {rule or 'it'} must be like NAME=FIELD; fields are {', '.join(FIELDS)}; a NAME with"
                ' a comma is in double quotes, such as "Question, short"=prompt'
            )
        fields[name] = field
    return fields


def _quote_name(name: str) -> str:
    """Quote a name as --columns requires."""
    doubled = name.replace('"', '""')
    return f'"{doubled}"' if "," in name or name.startswith('"') else name


def fields_of(names: Collection[str], columns: Mapping[str, str]) -> dict[str, str]:
    """Return {lower-case column: field}: `columns` of --columns, aliases, and guesses for a question and an answer."""
    fields = ALIASES | dict(columns)
    field_names = {fields.get(name, name) for name in names}
    name_pair = next((pair for pair in NAME_PAIRS if field_names.issuperset(pair)), None)
    if name_pair is not None and not field_names & set(CONVERSATION_FIELDS):
        fields.setdefault(name_pair[0], "prompt")
        answer_field = "chosen" if field_names & {"chosen", "rejected"} else "completion"
        fields.setdefault(name_pair[1], answer_field)
        if "prompt" not in columns.values():
            fields = dict.fromkeys(JOINED_NAMES, "prompt") | fields
    return fields


def renaming(names: Sequence[str], fields: Mapping[str, str]) -> str:
    """Describe which of the columns `names` become which field, `Question → prompt`; empty if all keep their names."""
    columns_by_field: dict[str, list[str]] = {}
    for name in names:
        if (lower := name.strip().lower()) in fields:
            columns_by_field.setdefault(fields[lower], []).append(name.strip())
    return ", ".join(
        f"{' + '.join(columns)} → {field}"
        for field, columns in columns_by_field.items()
        if [column.lower() for column in columns] != [field]
    )


def unknown_header(
    location: str, names: Sequence[str], fields: Sequence[str], record: Mapping[str, object]
) -> InputError:
    """Return the error for a header without a known column, or for a missing header.

    fields  fields that the columns should become
    record  first record, whose longest texts the message takes as an example of these fields
    """
    names = [name for name in names if name]
    if not names:
        return InputError(f"{location} names no columns; it must name {' and '.join(fields)}")
    numbered_columns = ",".join(f"{i}={field}" for i, field in enumerate(fields, 1))
    if any(_is_sentence(name) for name in names):
        return InputError(
            f"{location} is no header but a record: {shortlist(names)}; write the row"
            f" {','.join(fields)} above it, or give --columns {numbered_columns}"
        )
    longest = sorted(names, key=lambda name: -len(str(record.get(name.lower()))))[: len(fields)]
    columns = sorted(longest, key=names.index)
    named = ",".join(f"{_quote_name(n)}={field}" for n, field in zip(columns, fields, strict=False))
    return InputError(
        f"{location} names the columns {shortlist(names)}; say which to read as {' and '.join(fields)}, for example"
        f" --columns {shlex.quote(named)}; if this row is no header: --columns {numbered_columns}"
    )


def _is_sentence(name: str) -> bool:
    """Whether a name looks like a sentence, so that the row is a record and no header."""
    is_long = len(name) > MAX_CHARACTERS or len(name.split()) >= SENTENCE_WORDS
    return is_long or name.endswith(SENTENCE_ENDS)
