"""Behaviour check after a fine-tuning run: held-out questions, answered by the base and by the tuned model.

Questions are samples of the validation data up to their last answer, so that no template is applied twice. Answers are
drawn as `packtrain chat` draws them; the memory of the run is free by then, and the check stays within the same budget.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import cast

import numpy as np

from packtrain.common.errors import DoesNotFit, InputError, Interrupted
from packtrain.common.events import Events
from packtrain.common.files import write_text
from packtrain.common.memory import private_nbytes, settle
from packtrain.common.text import plural
from packtrain.data.chat_template import ChatTemplate, template_source
from packtrain.dtypes import DTYPES
from packtrain.engine.backends import CPU
from packtrain.inference.generator import Generator, Limits, Reply
from packtrain.inference.sampling import Sampling
from packtrain.models.adapter_file import fitted, read_adapter
from packtrain.models.model_file import ModelFile, open_model
from packtrain.models.model_with_adapters import adapted
from packtrain.training.finetune_job import ADAPTER, Tuned
from packtrain.training.finetune_settings import TuneSettings
from packtrain.training.pair_batches import PairBatches
from packtrain.training.sample_batches import SampleBatches
from packtrain.training.training_job import Job
from packtrain.workflows.generation_settings import check_cache

ANSWERS = "answers.json"
MAX_TOKENS = 200  # of an answer
LOOP_TOKENS = 64  # an answer is so short that fewer repeated tokens than in `chat` make a loop
PROMPT_ROWS = 64  # tokens of a prompt that are read at once
TOKEN_NBYTES = 400  # of a token in a vocabulary that is read; 200 were measured
MARK = "\x00"
ENDINGS = {
    "end": "ended by itself",
    "loop": "repeats itself, stopped",
    "count": f"no end, cut at {MAX_TOKENS} tokens",
    "context": "no end, the context is full",
}
HELP = "more --epochs or a larger --lr teach more"


@dataclass(frozen=True, slots=True)
class CheckedAnswer:
    """A held-out question, the data's answer, and those of base and tuned model.

    base_ended, tuned_ended  "end" if the model ended its answer by itself, "loop" if it repeated itself, "count" if the
                             answer was cut at MAX_TOKENS
    reference_tokens         length of the data's answer
    """

    question: str
    reference: str
    base: str
    base_ended: str
    tuned: str
    tuned_ended: str
    reference_tokens: int

    @property
    def is_endless(self) -> bool:
        """Whether the tuned model should have ended its answer and did not."""
        return self.tuned_ended == "loop" or (
            self.tuned_ended != "end" and self.reference_tokens < MAX_TOKENS
        )


def read_answers(folder: Path) -> tuple[CheckedAnswer, ...]:
    """Answers that the check of a run wrote; none if there was no check."""
    path = folder / ANSWERS
    text = path.read_text(encoding="utf-8") if path.exists() else "[]"
    return tuple(CheckedAnswer(**answer) for answer in json.loads(text))


def check_answers(job: Job, budget: int | None, events: Events) -> None:
    """Answer held-out questions, report the answers and keep them in the run folder; a stop ends only the check."""
    settings, subject = cast(TuneSettings, job.settings), cast(Tuned, job.subject)
    (settings.folder / ANSWERS).unlink(missing_ok=True)
    questions = held_out(job, settings.check_answers)
    if not questions or not _has_room(job, budget, events):
        return
    prompts, replies = [prompt for prompt, _ in questions], list[list[tuple[str, str]]]()
    try:
        with events.stopping() as stopped:
            for name, model in (("base", subject.model), ("tuned model", _tuned(job))):
                with events.counting(f"held-out questions, {name}", "answer") as count:
                    replies.append([])
                    for reply in _replies(job, model, prompts, budget, stopped):
                        replies[-1].append(reply)
                        count(len(replies[-1]), len(prompts))
    except Interrupted:
        events.message("stopped while answering held-out questions; the result is complete")
        return
    except (DoesNotFit, InputError) as error:
        events.message(f"no held-out questions are answered: {error}")
        return
    tokenizer, texts = subject.model.tokenizer(), question_texts(subject, prompts)
    answers = [
        CheckedAnswer(
            text, tokenizer.decode(ids).strip(), base, base_ended, tuned, tuned_ended, len(ids)
        )
        for text, (_, ids), (base, base_ended), (tuned, tuned_ended) in zip(
            texts, questions, *replies, strict=True
        )
    ]
    listed = json.dumps([asdict(a) for a in answers], indent=1, ensure_ascii=False)
    write_text(settings.folder / ANSWERS, listed + "\n")
    events.answers(answers)
    for line in findings(answers):
        events.message(line)


def _has_room(job: Job, budget: int | None, events: Events) -> bool:
    """Whether the budget leaves room for the vocabulary; said if not."""
    settle()
    if budget is None or budget - private_nbytes() >= TOKEN_NBYTES * job.config.vocab_size:
        return True
    events.message("no held-out questions are answered: --memory leaves too little")
    return False


def held_out(job: Job, count: int) -> list[tuple[list[int], list[int]]]:
    """Token ids of up to `count` questions of the validation data, and of their answers; short answers come first."""
    questions = dict[tuple[int, ...], list[int]]()
    valid = job.valid
    if not count or not isinstance(valid, SampleBatches) or not cast(Tuned, job.subject).ends:
        return []
    samples = valid.samples
    for number in range(0, len(samples), 2 if isinstance(valid, PairBatches) else 1):
        ids, weights = samples[number]
        end = int(np.flatnonzero(weights)[-1]) + 1
        start = int(np.flatnonzero(weights[:end] == 0)[-1]) + 1 if not weights[:end].all() else 0
        if 0 < start < job.config.context_length:
            questions.setdefault(tuple(ids[:start].tolist()), ids[start:end].tolist())
        if sum(len(reference) < MAX_TOKENS for reference in questions.values()) >= count:
            break
    ordered = sorted(questions.items(), key=lambda pair: len(pair[1]) >= MAX_TOKENS)
    return [([*prompt], reference) for prompt, reference in ordered[:count]]


def _tuned(job: Job) -> ModelFile:
    """The result of the run: its file, or the base with the adapter where nothing was merged."""
    settings, base = cast(TuneSettings, job.settings), cast(Tuned, job.subject).model
    if settings.full or settings.merge != "none":
        return open_model(settings.output)
    path = settings.folder / ADAPTER
    adapter = fitted(read_adapter(path), path, base.gguf)
    return adapted(base, [(adapter, 1.0)], aware=adapter.aware)


def _replies(
    job: Job,
    model: ModelFile,
    prompts: Sequence[Sequence[int]],
    budget: int | None,
    stopped: Callable[[], bool],
) -> Iterator[tuple[str, str]]:
    """The answer to each prompt, and why it ended. Raises DoesNotFit, InputError, and Interrupted on a stop."""
    target, tokenizer = job.settings.target, model.tokenizer()
    cells = min(max(map(len, prompts)) + MAX_TOKENS, model.config.context_length)
    check_cache(model, cells, "f16")
    generator = Generator.of(
        model, cells, DTYPES["f16"], target if len(target.every) == 1 else CPU,
        prompts=(PROMPT_ROWS,), checkpoints=0, memory=budget,
        beside=model.gguf.nbytes if job.settings.strict else 0,
    )  # fmt: skip
    limits = Limits(MAX_TOKENS, (), stopped, LOOP_TOKENS)
    for number, prompt in enumerate(prompts):
        seed = job.settings.seed + number
        reply = Reply(generator, tokenizer, prompt, Sampling(), seed, limits)
        text = "".join(reply).strip()
        if reply.ended == "interrupted":
            raise Interrupted("stopped")
        yield text, reply.ended


def question_texts(subject: Tuned, prompts: Sequence[Sequence[int]]) -> list[str]:
    """The user's last message of each prompt, without what the chat template puts around it."""
    tokenizer, metadata = subject.model.tokenizer(), subject.model.gguf.metadata
    texts = [tokenizer.decode(prompt, special=True) for prompt in prompts]
    turns = [{"role": role, "content": MARK} for role in ("user", "assistant", "user")]
    try:
        eos = (
            "" if tokenizer.eos is None else tokenizer.piece(tokenizer.eos).decode(errors="replace")
        )
        template = ChatTemplate(subject.template or template_source(metadata) or "", "", eos)
        before, _, between, after = template.render(turns, add_generation_prompt=True).split(MARK)
    except (InputError, ValueError):  # a template that takes no such turns
        return texts
    shared = takewhile(
        lambda pair: pair[0] == pair[1], zip(before[::-1], between[::-1], strict=False)
    )
    opening = "".join(character for character, _ in shared)[::-1]
    end_pattern, start_pattern = (rf"\s*{_spaced(text)}\s*" for text in (after, opening))
    cut = [re.sub(f"{end_pattern}$", "", text) for text in texts]
    return [
        (re.split(start_pattern, text)[-1] if opening.strip() else text).strip() for text in cut
    ]


def _spaced(text: str) -> str:
    """A regular expression of the text with any white space, which some vocabularies add beside control tokens."""
    return r"\s*".join(map(re.escape, text.split()))


def findings(answers: Sequence[CheckedAnswer]) -> Iterator[str]:
    """Sentences about tuned answers that do not end, and about answers that are the base's."""
    endless = sum(answer.is_endless for answer in answers)
    loops = sum(answer.tuned_ended == "loop" for answer in answers)
    if all(answer.tuned == answer.base for answer in answers):
        yield f"the tuned model answers as the base does: {HELP}"
    if endless:
        repeating = f", {loops} of them repeating themselves," if loops else ""
        yield (
            f"{endless} of {plural(len(answers), 'tuned answer')}{repeating} did not end: {HELP};"
            " --temp 0 makes chat's answers steadier"
        )
