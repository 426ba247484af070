"""The heavy part, run in a child process: read the data, render, tokenize, truncate, write the files of each split.

Fills an empty folder as a Recipe says; `prepare` then reads it. Records are streamed, once.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packtrain.common.errors import InputError
from packtrain.common.text import plural
from packtrain.data.chat_template import (
    MEMORY,
    ChatTemplate,
    Chosen,
    choose_template,
    template_source,
)
from packtrain.data.conversations.conversation_renderer import Renderer
from packtrain.data.conversations.loss_mask import Masker, Sample, windows
from packtrain.data.conversations.messages import Conversation, Pair
from packtrain.data.conversations.record_formats import Plain, Reader
from packtrain.data.conversations.samples_store import SampleFile, write_samples
from packtrain.data.text.documents import TRAIN, VALID, Source, find_sources
from packtrain.data.text.text_streams import COLUMNS, SUFFIXES, TABLES, kind_of
from packtrain.data.token_cache import Say
from packtrain.data.tokenizer import Tokenizer
from packtrain.gguf import GGUF

NOTES_FILE = "notes.json"
ROWS = (*TABLES, *COLUMNS)
SECONDS_BETWEEN_LINES = 3.0
MAX_PLACES = 1000  # samples whose place in the data is known
END, DROP, SPLIT = TRUNCATE = ("end", "drop", "split")
FATES = {END: "cut at their end", DROP: "left out", SPLIT: "split"}
CONTROLS = "messages that spell control tokens, which become these tokens as in llama.cpp"
UNPAIRED = "pairs left out because, cut to the context, an answer is empty or equals the other"
UNLIKE = {
    True: "is no pair of answers; for this loss it must have prompt, chosen and rejected",
    False: "is a pair of answers, chosen and rejected; such data is for finetune --loss dpo, ipo, simpo or orpo",
}
RENDERER_NBYTES = 16 << 20  # of a process that renders nothing yet; 10 to 12 were measured
RENDERING = 4  # the part of the room that rendering takes
UNTRAINED = "samples left out because they have no tokens to train on"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to prepare, and how.

    model      a GGUF file: its vocabulary and its chat template
    length     the most targets of a sample
    truncate   longer conversations: cut at the end, dropped, or split; texts are always split
    everything, last_only   train on prompts, too; train on the assistant's last turn only
    separator, val_split    as in data.text.documents.Text
    skip_bad   skip records that cannot be used
    pairs      of a chosen and a rejected answer, which become two samples, one after the other: only them, none of them
               or, with None, both
    columns    how columns of records are named as fields
    template   chat template instead of the model's own
    """

    data: Path
    model: Path
    length: int
    truncate: str = END
    everything: bool = False
    last_only: bool = False
    separator: str | None = None
    val_split: float = 0.0
    skip_bad: bool = False
    template: str | None = None
    pairs: bool | None = False
    columns: str | None = None


def sources_of(recipe: Recipe) -> tuple[Source, ...]:
    return find_sources(recipe.data, SUFFIXES)


def parts_of(recipe: Recipe, sources: Iterable[Source]) -> tuple[str, ...]:
    """The splits that the samples have."""
    return (TRAIN, VALID) if recipe.val_split or any(s.part for s in sources) else (TRAIN,)


def write_dataset(recipe: Recipe, folder: Path, report: Say, room: int | None = None) -> None:
    """Fill the folder. Raises InputError for bad data."""
    file = GGUF(recipe.model)
    try:
        maker = Maker(recipe, file.metadata, MEMORY if room is None else room // RENDERING)
    except InputError as error:
        raise InputError(f"{recipe.model}: {error}") from None
    sources = sources_of(recipe)
    split = 0.0 if any(source.part for source in sources) else recipe.val_split
    parts = parts_of(recipe, sources)
    turns, notes, count = Turns(round(1 / split) if split else 0), list[str](), 0
    with ExitStack() as stack:
        files = {
            part: stack.enter_context(
                write_samples(folder, part, maker.masker.tokenizer.vocab_size)
            )
            for part in parts
        }
        for source in sources:
            reader = Reader(source, recipe.separator, recipe.skip_bad, recipe.columns)
            _write(reader, report, turns, maker, files)
            if not reader.count:
                details = f" ({' '.join(reader.report.notes)})" if reader.report.bad else ""
                raise InputError(f"{source.path} holds no records; at least one is needed{details}")
            notes += reader.notes
            count += reader.count
        notes += maker.messages
        if split:
            notes.append(turns.note(split, sources, count))
            files = files if turns.held_out else {TRAIN: files[TRAIN]}
        _check_filled(recipe, files, notes)
    metadata = {
        "notes": notes,
        "places": turns.places,
        "parts": [*files],
        "names": [source.path.name for source in sources],
        "template": maker.template,
        "ends": sorted(maker.masker.tokenizer.ends),
    }
    (folder / NOTES_FILE).write_text(json.dumps(metadata), encoding="utf-8")


@dataclass(slots=True)
class Turns:
    """Chooses samples for validation: every k-th, over all files; none if `every` is 0.

    places  where the first samples of the other part are in the data
    """

    every: int
    number: int = 0
    places: list[str] = field(default_factory=list)

    @property
    def part(self) -> str:
        return VALID if self.every and self.number % self.every == 0 else TRAIN

    @property
    def held_out(self) -> int:
        return self.number // self.every if self.every else 0

    def note(self, split: float, sources: Iterable[Source], records: int) -> str:
        """Says how many are held out for validation."""
        unit = "row" if all(kind_of(source.path) in ROWS for source in sources) else "record"
        counted = plural(self.number, unit if self.number == records else "sample")
        are = "is" if self.held_out == 1 else "are"
        if self.held_out:
            return f"{self.held_out:,} of {counted} {are} held out for validation"
        larger = f"; --val-split {1 / self.number:.2g} holds out one" if self.number > 1 else ""
        return f"nothing is held out for validation: --val-split {split:g} of {counted} is less than one{larger}"


def _write(
    reader: Reader, report: Say, turns: Turns, maker: "Maker", files: Mapping[str, SampleFile]
) -> None:
    """Write all samples of a file; those of one conversation go to the same split."""
    for record in _reported(reader, report):
        try:
            samples = maker.samples(record)
        except InputError as error:
            reader.reject(error)
            continue
        turns.number += isinstance(record, Conversation | Pair)
        for sample in samples:
            turns.number += isinstance(record, Plain)
            part = reader.source.part or turns.part
            files[part].add(sample)
            if part == TRAIN and len(turns.places) < MAX_PLACES:
                turns.places.append(
                    f"{reader.source.path.name}: {record.where.rpartition(': ')[2]}"
                )


def _reported(reader: Reader, report: Say) -> Iterator[Conversation | Pair | Plain]:
    """The same records; prints progress every few seconds."""
    printed = time.monotonic()
    for record in reader:
        if time.monotonic() - printed > SECONDS_BETWEEN_LINES:
            printed = time.monotonic()
            report(f"{reader.source.path.name}: {reader.count:,} records")
        yield record


def _check_filled(recipe: Recipe, files: Mapping[str, SampleFile], notes: list[str]) -> None:
    for part, file in files.items():
        if not file.starts:
            spoken = {TRAIN: "training", VALID: "validation"}[part]
            raise InputError(
                f"--data: {recipe.data} leaves no tokens to train on for {spoken} ({'; '.join(notes)})"
            )


class Maker:
    """Turns records into samples; `messages` then reports what may surprise."""

    def __init__(
        self, recipe: Recipe, metadata: Mapping[str, Any], rendering: int = MEMORY
    ) -> None:
        self.recipe, self._metadata, self._rendering = recipe, metadata, rendering
        self.masker = Masker(Tokenizer(metadata), recipe.everything)
        self.notes: Counter[str] = Counter()
        self._chosen: dict[bool, Chosen] = {}  # for conversations with tools, and without
        self._renderers: dict[Chosen, Renderer] = {}

    @property
    def messages(self) -> list[str]:
        """Messages to print at the end."""
        notes = sum((renderer.notes for renderer in self._renderers.values()), self.notes)
        counted = [f"{description}: {count:,}" for description, count in notes.items() if count]
        return [*(choice.note for choice in self._renderers if choice.why), *counted]

    @property
    def template(self) -> str | None:
        """The chat template if it is not the model's own; the trained model's file must then contain it."""
        return next((choice.source for choice in self._renderers if choice.why), None)

    def _renderer(self, tools: bool) -> Renderer:
        """The renderer of the model's chat template, or of its template for tools; created on first use."""
        if tools not in self._chosen:
            model_template = template_source(self._metadata, tools)
            self._chosen[tools] = choose_template(
                self._metadata, model_template, self.recipe.template
            )
        choice = self._chosen[tools]
        if choice not in self._renderers:
            tokenizer = self.masker.tokenizer
            bos, eos = (
                "" if id is None else tokenizer.piece(id).decode(errors="replace")
                for id in (tokenizer.bos, tokenizer.eos)
            )
            template = ChatTemplate(choice.source, bos, eos, memory=self._rendering)
            self._renderers[choice] = Renderer(template, self.masker.ends, self.recipe.last_only)
        return self._renderers[choice]

    def samples(self, record: Conversation | Pair | Plain) -> Iterator[Sample]:
        """The samples of a record that have tokens to train on; those of a conversation are built at once."""
        wants_pairs = self.recipe.pairs
        if wants_pairs is not None and isinstance(record, Pair) != wants_pairs:
            raise InputError(f"{record.where} {UNLIKE[wants_pairs]}")
        if isinstance(record, Plain):
            return _placed(self._text(record), record.where)
        samples = self._pair(record) if isinstance(record, Pair) else self._conversation(record)
        return iter(list(_placed(samples, record.where)))

    def _text(self, record: Plain) -> Iterator[Sample]:
        ids = self.masker.text(record.pieces, record.checked)
        for window in windows(ids, self.recipe.length, self.masker.first):
            yield Sample(window, [1] * len(window))

    def _pair(self, record: Pair) -> Iterator[Sample]:
        """Both answers, the chosen one first, if both have tokens to train on."""
        answers = [
            sample
            for conversation in (record.chosen, record.rejected)
            for sample in self._last(conversation)
        ]
        if len(answers) == 2 and answers[0] != answers[1]:
            yield from answers
        else:
            self.notes[UNPAIRED] += 1

    def _last(self, record: Conversation) -> list[Sample]:
        """The sample of an answer, the last one where the template needs several; none if it is left out."""
        return [*self._conversation(record)][-1:]

    def _conversation(self, record: Conversation) -> Iterator[Sample]:
        if self.recipe.everything and any(m.get("weight") == 0 for m in record.messages):
            fact = f"{record.where} has a message that must not be trained on"
            raise InputError(fact, "--no-mask-prompt would")
        words = (message["content"] for message in record.messages)
        self.notes[CONTROLS] += sum(map(self.masker.spells_control, words))
        for rendered in self._renderer(record.tools is not None).render(record):
            for sample in self._cut(self.masker.conversation(rendered)):
                if sample.trained:
                    yield sample
                else:
                    self.notes[UNTRAINED] += 1

    def _cut(self, sample: Sample) -> Iterator[Sample]:
        """A conversation, truncated or split if it is longer than a sample."""
        max_tokens, ids, weights = self.recipe.length + 1, sample.ids, sample.weights
        if len(ids) <= max_tokens:
            yield sample
            return
        self.notes[
            f"conversations longer than {self.recipe.length:,} tokens, {FATES[self.recipe.truncate]}"
        ] += 1
        if self.recipe.truncate == DROP:
            return
        last = len(ids) - 1 if self.recipe.truncate == SPLIT else 1
        for at in range(0, last, self.recipe.length):
            part = ids[at : at + max_tokens]
            part[0] = part[0] if self.masker.first is None else self.masker.first
            yield Sample(part, weights[at : at + max_tokens])


def _placed(samples: Iterator[Sample], location: str) -> Iterator[Sample]:
    """The same samples; adds the place of the record to errors."""
    try:
        yield from samples
    except InputError as error:
        raise InputError(f"{location}: {error.fact}", error.advice) from None
