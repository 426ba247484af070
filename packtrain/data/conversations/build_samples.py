"""The heavy part, run in a child process: read the data, render, tokenize, truncate, write the files of each split.

`write_dataset` fills an empty folder by a DatasetRecipe; `prepare_dataset` reads it. Records are streamed, once."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from packtrain.common.errors import InputError
from packtrain.common.text import plural
from packtrain.data import chat_template
from packtrain.data.chat_template import MEMORY_NBYTES, ChatTemplate, TemplateChoice
from packtrain.data.conversations.conversation_renderer import ConversationRenderer
from packtrain.data.conversations.loss_mask import LossMasker, MaskedSample, windows
from packtrain.data.conversations.messages import AnswerPair, Conversation
from packtrain.data.conversations.record_formats import PlainText, RecordReader
from packtrain.data.text import documents
from packtrain.data.text.documents import SPLIT_NAMES, TRAIN, VALID, SourceFile, find_sources
from packtrain.data.text.text_streams import COLUMNS, DATA_SUFFIXES, TABLES, suffix_of
from packtrain.data.text.token_files import TokenFile, write_tokens
from packtrain.data.token_cache import ReportProgress, report_progress
from packtrain.data.tokenizer import Tokenizer
from packtrain.gguf import GGUF

NOTES_FILE = "notes.json"
ROWS = (*TABLES, *COLUMNS)
MAX_LOCATIONS = 1000  # number of samples whose place in the data is recorded
TRUNCATE_END, TRUNCATE_DROP, TRUNCATE_SPLIT = TRUNCATE_CHOICES = ("end", "drop", "split")
FATES = {TRUNCATE_END: "cut at their end", TRUNCATE_DROP: "left out", TRUNCATE_SPLIT: "split"}
CONTROL_NOTE = "messages that spell control tokens, which become these tokens as in llama.cpp"
UNPAIRED_NOTE = "pairs left out because, cut to the context, an answer is empty or equals the other"
MISMATCH_FACTS = {
    True: "is no pair of answers; for this loss it must have prompt, chosen and rejected",
    False: "is a pair of answers, chosen and rejected; such data is for finetune --loss dpo, ipo, simpo or orpo",
}
RENDERER_NBYTES = 16 << 20  # of a process that has rendered nothing; 10 to 12 MiB were measured
RENDERER_DIVISOR = 4  # rendering takes the memory limit divided by this
# flags of fields of a recipe that say how conversations become samples
CHAT_FLAGS = {"truncate": "--truncate", "last_only": "--train-on", "template": "--chat-template"}
UNTRAINED_NOTE = "samples left out because they have no tokens to train on"


@dataclass(frozen=True, slots=True)
class DatasetRecipe:
    """Data to prepare, and how to turn it into samples.

    model       GGUF file with the vocabulary and the chat template
    length      most targets of a sample, which has one token more: the first is no target
    truncate    longer conversations are cut at their end, dropped, or split; texts are always split
    everything  train on prompts, too; `last_only`: train on the assistant's last turn only
    separator   text between documents of a text file, as in CorpusRecipe; `val_split`: share held out for validation
    skip_bad    skip records that cannot be used
    pairs       pairs of a chosen and a rejected answer become two successive samples; True: all records must be pairs,
                False: none may be, None: both are allowed
    columns     --columns, such as `question=prompt`: renames columns to fields; None: names of common pairs are guessed
    template    chat template instead of the model's own
    """

    data: Path
    model: Path
    length: int
    truncate: str = TRUNCATE_END
    everything: bool = False
    last_only: bool = False
    separator: str | None = None
    val_split: float = 0.0
    skip_bad: bool = False
    template: str | None = None
    pairs: bool | None = False
    columns: str | None = None


def write_dataset(
    recipe: DatasetRecipe, folder: Path, report: ReportProgress, room: int | None = None
) -> None:
    """Fill an empty folder with the samples; `room`: bytes left of --memory, None: no limit. Raises InputError."""
    file = GGUF(recipe.model)
    renderer_room = MEMORY_NBYTES if room is None else room // RENDERER_DIVISOR
    try:
        maker = SampleBuilder(recipe, file.metadata, renderer_room)
    except InputError as error:
        raise InputError(f"{recipe.model}: {error}") from None
    sources = find_sources(recipe.data, DATA_SUFFIXES)
    documents.check_separator(recipe.separator, sources)
    split = 0.0 if any(source.split for source in sources) else recipe.val_split
    splits = documents.splits_of(recipe.val_split, sources)
    splitter, notes, count = ValidationSplitter(round(1 / split) if split else 0), list[str](), 0
    with ExitStack() as stack:
        vocab_size = maker.masker.tokenizer.vocab_size
        files = {p: stack.enter_context(write_tokens(folder, p, vocab_size, True)) for p in splits}
        for source in sources:
            reader = RecordReader(source, recipe.separator, recipe.skip_bad, recipe.columns)
            _write_records(reader, report, splitter, maker, files)
            if not reader.count:
                details = f" ({' '.join(reader.report.notes)})" if reader.report.num_bad else ""
                raise InputError(f"{source.path} holds no records; at least one is needed{details}")
            notes += reader.notes
            count += reader.count
        notes += maker.messages
        if split:
            notes.append(splitter.note(split, sources, count))
            files = files if splitter.num_held_out else {TRAIN: files[TRAIN]}
        for part, token_file in files.items():
            if not token_file.starts:
                fact = f"--data: {recipe.data} leaves no tokens to train on for {SPLIT_NAMES[part]}"
                raise InputError(f"{fact} ({'; '.join(notes)})")
    metadata = {
        "notes": notes, "places": splitter.locations, "parts": [*files],
        "names": [source.path.name for source in sources], "template": maker.template,
        "ends": sorted(maker.masker.tokenizer.eog_ids),
    }  # fmt: skip
    (folder / NOTES_FILE).write_text(json.dumps(metadata), encoding="utf-8")


@dataclass(slots=True)
class ValidationSplitter:
    """Chooses samples for validation: every `interval`-th, over all files; none if `interval` is 0.

    number     samples so far
    locations  places of the first training samples in the data
    """

    interval: int
    number: int = 0
    locations: list[str] = field(default_factory=list)

    @property
    def split(self) -> str:
        return VALID if self.interval and self.number % self.interval == 0 else TRAIN

    @property
    def num_held_out(self) -> int:
        return self.number // self.interval if self.interval else 0

    def note(self, split: float, sources: Iterable[SourceFile], num_records: int) -> str:
        """Say how many samples are held out for validation, where --val-split is `split`, of `num_records` records."""
        unit = "row" if all(suffix_of(source.path) in ROWS for source in sources) else "record"
        counted_text = plural(self.number, unit if self.number == num_records else "sample")
        verb = "is" if self.num_held_out == 1 else "are"
        if self.num_held_out:
            return f"{self.num_held_out:,} of {counted_text} {verb} held out for validation"
        larger = f"; --val-split {1 / self.number:.2g} holds out one" if self.number > 1 else ""
        return f"nothing is held out for validation: --val-split {split:g} of {counted_text} is less than one{larger}"


def _write_records(
    reader: RecordReader, report: ReportProgress, splitter: ValidationSplitter, builder: "SampleBuilder",
    files: Mapping[str, TokenFile],
) -> None:  # fmt: skip
    """Write the samples of a file's usable records to `files`, by split; those of one conversation to one split."""
    name = reader.source.path.name
    for record in report_progress(reader, report, lambda: f"{name}: {reader.count:,} records"):
        try:
            samples = builder.samples(record)
        except InputError as error:
            reader.reject(error)
            continue
        splitter.number += isinstance(record, Conversation | AnswerPair)
        for sample in samples:
            splitter.number += isinstance(record, PlainText)
            split = reader.source.split or splitter.split
            files[split].begin_document()
            files[split].write(sample.ids, sample.weights)
            if split == TRAIN and len(splitter.locations) < MAX_LOCATIONS:
                splitter.locations.append(f"{name}: {record.location.rpartition(': ')[2]}")


class SampleBuilder:
    """Turns records into samples; `messages` then reports unexpected findings."""

    def __init__(
        self, recipe: DatasetRecipe, metadata: Mapping[str, Any], rendering: int = MEMORY_NBYTES
    ) -> None:
        self.recipe, self._metadata, self._rendering_nbytes = recipe, metadata, rendering
        self.masker = LossMasker(Tokenizer(metadata), recipe.everything)
        self.notes: Counter[str] = Counter()
        self._chosen: dict[bool, TemplateChoice] = {}  # for conversations with tools, and without
        self._renderers: dict[TemplateChoice, ConversationRenderer] = {}

    @property
    def messages(self) -> list[str]:
        """Return messages to print at the end."""
        notes = sum((renderer.notes for renderer in self._renderers.values()), self.notes)
        counted = [f"{description}: {count:,}" for description, count in notes.items() if count]
        for setting in () if self._renderers else fields(DatasetRecipe):
            if setting.name in CHAT_FLAGS and getattr(self.recipe, setting.name) != setting.default:
                fact = f"{CHAT_FLAGS[setting.name]} has no effect"
                counted.append(f"{fact}: the data has no conversation")
        return [*(choice.note for choice in self._renderers if choice.reason), *counted]

    @property
    def template(self) -> str | None:
        """Return the chat template if it is not the model's own; the trained model's file must then contain it."""
        return next((choice.source for choice in self._renderers if choice.reason), None)

    def _renderer_for(self, has_tools: bool) -> ConversationRenderer:
        """Return the renderer of the model's chat template, or of its template for tools; created on first use."""
        if has_tools not in self._chosen:
            model_template = chat_template.template_source(self._metadata, has_tools)
            self._chosen[has_tools] = chat_template.choose_template(
                self._metadata, model_template, self.recipe.template
            )
        choice = self._chosen[has_tools]
        if choice not in self._renderers:
            tokenizer = self.masker.tokenizer
            bos, eos = (
                "" if id is None else tokenizer.piece(id).decode(errors="replace")
                for id in (tokenizer.bos, tokenizer.eos)
            )
            template = ChatTemplate(choice.source, bos, eos, memory=self._rendering_nbytes)
            self._renderers[choice] = ConversationRenderer(
                template, self.masker.eog_texts, self.recipe.last_only
            )
        return self._renderers[choice]

    def samples(self, record: Conversation | AnswerPair | PlainText) -> Iterator[MaskedSample]:
        """Return the samples of a record that have trained tokens; a conversation's are all built before the first."""
        requires_pairs = self.recipe.pairs
        if requires_pairs is not None and isinstance(record, AnswerPair) != requires_pairs:
            raise InputError(f"{record.location} {MISMATCH_FACTS[requires_pairs]}")
        if isinstance(record, PlainText):
            return _locate_errors(self._text_samples(record), record.location)
        if isinstance(record, AnswerPair):
            return iter([*_locate_errors(self._pair_samples(record), record.location)])
        return iter([*_locate_errors(self._conversation_samples(record), record.location)])

    def _text_samples(self, record: PlainText) -> Iterator[MaskedSample]:
        ids = self.masker.encode_text(record.pieces, record.parse_special)
        for window in windows(ids, self.recipe.length, self.masker.bos_id):
            yield MaskedSample(window, [1] * len(window))

    def _pair_samples(self, record: AnswerPair) -> Iterator[MaskedSample]:
        """Yield the samples of both answers, chosen first; none, but a note, if one is untrained or they are equal."""
        conversations = (record.chosen, record.rejected)
        # the last sample, if the template needs several; none if the answer is left out
        answers = [s for c in conversations for s in [*self._conversation_samples(c)][-1:]]
        if len(answers) == 2 and answers[0] != answers[1]:
            yield from answers
        else:
            self.notes[UNPAIRED_NOTE] += 1

    def _conversation_samples(self, record: Conversation) -> Iterator[MaskedSample]:
        if self.recipe.everything and any(m.get("weight") == 0 for m in record.messages):
            fact = f"{record.location} has a message that must not be trained on"
            raise InputError(fact, "--no-mask-prompt would")
        contents = (message["content"] for message in record.messages)
        control_texts = self.masker.control_texts
        self.notes[CONTROL_NOTE] += sum(
            any(t in words for t in control_texts) for words in contents
        )
        for rendered in self._renderer_for(record.tools is not None).render(record):
            for sample in self._fit_length(self.masker.mask_conversation(rendered)):
                if sample.num_trained:
                    yield sample
                else:
                    self.notes[UNTRAINED_NOTE] += 1

    def _fit_length(self, sample: MaskedSample) -> Iterator[MaskedSample]:
        """Yield a conversation's sample, truncated or split if it is too long."""
        max_tokens, ids, weights = self.recipe.length + 1, sample.ids, sample.weights
        if len(ids) <= max_tokens:
            yield sample
            return
        self.notes[
            f"conversations longer than {self.recipe.length:,} tokens, {FATES[self.recipe.truncate]}"
        ] += 1
        if self.recipe.truncate == TRUNCATE_DROP:
            return
        stop = len(ids) - 1 if self.recipe.truncate == TRUNCATE_SPLIT else 1
        for start in range(0, stop, self.recipe.length):
            window = ids[start : start + max_tokens]
            window[0] = window[0] if self.masker.bos_id is None else self.masker.bos_id
            yield MaskedSample(window, weights[start : start + max_tokens])


def _locate_errors(samples: Iterator[MaskedSample], location: str) -> Iterator[MaskedSample]:
    """Yield the samples; adds the place of the record to errors."""
    try:
        yield from samples
    except InputError as error:
        raise InputError(f"{location}: {error.fact}", error.advice) from None
