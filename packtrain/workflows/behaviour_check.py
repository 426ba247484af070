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
from packtrain.common.memory import private_nbytes, release_memory
from packtrain.common.text import plural
from packtrain.data.chat_template import ChatTemplate, template_source
from packtrain.dtypes import DTYPES
from packtrain.engine.backends import CPU
from packtrain.inference.generator import GenerationLimits, Generator, Reply
from packtrain.inference.sampling import Sampling
from packtrain.models.adapter_file import fit_adapter, read_adapter
from packtrain.models.model_file import ModelFile, open_model
from packtrain.models.model_with_adapters import adapted
from packtrain.training.finetune_job import ADAPTER, TunedModel
from packtrain.training.finetune_settings import TuneSettings
from packtrain.training.pair_batches import PairBatches
from packtrain.training.sample_batches import SampleBatches
from packtrain.training.training_job import TrainingJob
from packtrain.workflows.generation_settings import check_cache

ANSWERS_FILE = "answers.json"
MAX_TOKENS = 200  # most tokens of an answer
LOOP_TOKENS = 64  # an answer is so short that fewer repeated tokens than in `chat` make a loop
PROMPT_ROWS = 64  # tokens of a prompt that are read at once
TOKEN_NBYTES = 400  # per token of a vocabulary that is read; 200 were measured
MARK = "\x00"
END_LABELS = {
    "end": "ended by itself", "loop": "repeats itself, stopped", "count": f"no end, cut at {MAX_TOKENS} tokens",
    "context": "no end, the context is full",
}  # fmt: skip
HELP = "more --epochs or a larger --lr teach more"


@dataclass(frozen=True, slots=True)
class CheckedAnswer:
    """A held-out question, the data's answer, and those of base and tuned model.

    base_ended, tuned_ended  "end" if the model ended its answer by itself, "loop" if it repeated itself, "count" if the
                             answer was cut at MAX_TOKENS, "context" if the context was full
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
        """Whether the tuned model should have ended its answer but did not."""
        return self.tuned_ended == "loop" or (
            self.tuned_ended != "end" and self.reference_tokens < MAX_TOKENS
        )


def read_answers(folder: Path) -> tuple[CheckedAnswer, ...]:
    """Read the answers that the check of a run wrote; () if there was no check."""
    answers_path = folder / ANSWERS_FILE
    answers_json = answers_path.read_text(encoding="utf-8") if answers_path.exists() else "[]"
    return tuple(CheckedAnswer(**answer) for answer in json.loads(answers_json))


def check_answers(job: TrainingJob, budget: int | None, events: Events) -> None:
    """Answer held-out questions in `budget` bytes (None: no limit), report and save them; a stop ends only this."""
    settings, subject = cast(TuneSettings, job.settings), cast(TunedModel, job.model)
    (settings.folder / ANSWERS_FILE).unlink(missing_ok=True)
    questions = held_out_questions(job, settings.check_answers)
    if not questions or not _has_room(job, budget, events):
        return
    prompts, replies = [prompt for prompt, _ in questions], list[list[tuple[str, str]]]()
    try:
        with events.stopping() as stopped:
            for model_label, model in (("base", subject.model), ("tuned model", _tuned_model(job))):
                with events.counting(f"held-out questions, {model_label}", "answer") as count:
                    replies.append([])
                    for reply in _generate_replies(job, model, prompts, budget, stopped):
                        replies[-1].append(reply)
                        count(len(replies[-1]), len(prompts))
    except Interrupted:
        events.message("stopped while answering held-out questions; the result is complete")
        return
    except (DoesNotFit, InputError) as error:
        events.message(f"no held-out questions are answered: {error}")
        return
    tokenizer, texts = subject.model.tokenizer(), question_texts(subject, prompts)
    rows = zip(texts, questions, *replies, strict=True)
    answers = [
        CheckedAnswer(
            text, tokenizer.decode(ids).strip(), base, base_ended, tuned, tuned_ended, len(ids)
        )
        for text, (_, ids), (base, base_ended), (tuned, tuned_ended) in rows
    ]
    answers_json = json.dumps([asdict(a) for a in answers], indent=1, ensure_ascii=False)
    write_text(settings.folder / ANSWERS_FILE, answers_json + "\n")
    events.answers(answers)
    for finding in answer_findings(answers):
        events.message(finding)


def _has_room(job: TrainingJob, budget: int | None, events: Events) -> bool:
    """Return whether `budget` private bytes (None: no limit) leave room for a vocabulary; report it if they do not."""
    release_memory()
    if budget is None or budget - private_nbytes() >= TOKEN_NBYTES * job.config.vocab_size:
        return True
    events.message("no held-out questions are answered: --memory leaves too little")
    return False


def held_out_questions(job: TrainingJob, num_questions: int) -> list[tuple[list[int], list[int]]]:
    """Return (ids of the prompt, of the answer) of `num_questions` validation samples at most, short answers first."""
    questions = dict[tuple[int, ...], list[int]]()
    valid_batches = job.valid
    if (
        not num_questions
        or not isinstance(valid_batches, SampleBatches)
        or not cast(TunedModel, job.model).eog_ids
    ):
        return []
    samples = valid_batches.samples
    for sample_index in range(0, len(samples), 2 if isinstance(valid_batches, PairBatches) else 1):
        ids, weights = samples[sample_index]
        end = int(np.flatnonzero(weights)[-1]) + 1
        start = int(np.flatnonzero(weights[:end] == 0)[-1]) + 1 if not weights[:end].all() else 0
        if 0 < start < job.config.context_length:
            questions.setdefault(tuple(ids[:start].tolist()), ids[start:end].tolist())
        if sum(len(reference) < MAX_TOKENS for reference in questions.values()) >= num_questions:
            break
    sorted_questions = sorted(questions.items(), key=lambda pair: len(pair[1]) >= MAX_TOKENS)
    return [([*prompt], reference) for prompt, reference in sorted_questions[:num_questions]]


def _tuned_model(job: TrainingJob) -> ModelFile:
    """Open the result of the run: its file, or the base with the adapter where nothing was merged."""
    settings, base_model = cast(TuneSettings, job.settings), cast(TunedModel, job.model).model
    if settings.full or settings.merge != "none":
        return open_model(settings.output)
    adapter_path = settings.folder / ADAPTER
    adapter = fit_adapter(read_adapter(adapter_path), adapter_path, base_model.gguf)
    return adapted(base_model, [(adapter, 1.0)], aware=adapter.aware)


def _generate_replies(
    job: TrainingJob, model: ModelFile, prompts: Sequence[Sequence[int]], budget: int | None,
    stopped: Callable[[], bool],
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Yield (answer, its end as in CheckedAnswer) for each prompt. Raises DoesNotFit, InputError, Interrupted."""
    target, tokenizer = job.settings.target, model.tokenizer()
    num_cells = min(max(map(len, prompts)) + MAX_TOKENS, model.config.context_length)
    check_cache(model, num_cells, "f16")
    generator = Generator.from_model(
        model, num_cells, DTYPES["f16"], target if len(target.every) == 1 else CPU,
        prompts=(PROMPT_ROWS,), checkpoints=0, memory=budget,
    )  # fmt: skip
    limits = GenerationLimits(MAX_TOKENS, (), stopped, LOOP_TOKENS)
    for prompt_index, prompt in enumerate(prompts):
        seed = job.settings.seed + prompt_index
        reply = Reply(generator, tokenizer, prompt, Sampling(), seed, limits)
        reply_text = "".join(reply).strip()
        if reply.end_reason == "interrupted":
            raise Interrupted("stopped")
        yield reply_text, reply.end_reason


def question_texts(subject: TunedModel, prompts: Sequence[Sequence[int]]) -> list[str]:
    """Return the user's last message in each prompt (token ids), without the chat template's text around it."""
    tokenizer, metadata = subject.model.tokenizer(), subject.model.gguf.metadata
    prompt_texts = [tokenizer.decode(prompt, special=True) for prompt in prompts]
    turns = [{"role": role, "content": MARK} for role in ("user", "assistant", "user")]
    try:
        eos = (
            "" if tokenizer.eos is None else tokenizer.piece(tokenizer.eos).decode(errors="replace")
        )
        template = ChatTemplate(subject.chat_template or template_source(metadata) or "", "", eos)
        before, _, between, after = template.render(turns, add_generation_prompt=True).split(MARK)
    except (InputError, ValueError):  # a template that takes no such turns
        return prompt_texts
    shared_chars = takewhile(
        lambda pair: pair[0] == pair[1], zip(before[::-1], between[::-1], strict=False)
    )
    opening = "".join(character for character, _ in shared_chars)[::-1]
    # with any white space, which some vocabularies add beside control tokens
    end_pattern, start_pattern = (
        r"\s*".join(["", *map(re.escape, text.split()), ""]) for text in (after, opening)
    )
    cut = [re.sub(f"{end_pattern}$", "", text) for text in prompt_texts]
    if opening.strip():
        cut = [re.split(start_pattern, text)[-1] for text in cut]
    return [text.strip() for text in cut]


def answer_findings(answers: Sequence[CheckedAnswer]) -> Iterator[str]:
    """Yield sentences about tuned answers that do not end, or that all equal the base's."""
    endless = sum(answer.is_endless for answer in answers)
    num_loops = sum(answer.tuned_ended == "loop" for answer in answers)
    if all(answer.tuned == answer.base for answer in answers):
        yield f"the tuned model answers as the base does: {HELP}"
    if endless:
        loop_note = f", {num_loops} of them repeating themselves," if num_loops else ""
        yield (
            f"{endless} of {plural(len(answers), 'tuned answer')}{loop_note} did not end: {HELP};"
            " --temp 0 makes chat's answers steadier"
        )
