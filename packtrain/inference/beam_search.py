"""Beam search for the likeliest continuations of a prompt, several of which are followed at once.

Beams are sequences of a context that share KV cache cells of common tokens; a step is one batch."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from packtrain.data.tokenizer import StreamDecoder, Tokenizer
from packtrain.inference.generator import GenerationLimits, Speed, StopTextFilter, check_prompt
from packtrain.inference.kv_cache import Context
from packtrain.inference.sampling.samplers import log_probabilities


@dataclass(frozen=True, slots=True)
class BeamSearchConfig:
    """Settings: `width` beams are followed, `num_beams` returned; length ** `penalty` divides log-probabilities."""

    width: int
    num_beams: int = 1
    penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation: tokens after the prompt, with the end token; the sum of their log-probabilities; its sequence."""

    ids: tuple[int, ...] = ()
    log_prob: float = 0.0
    seq: int = 0
    end_reason: str = ""

    def score(self, penalty: float) -> float:
        return scored(self.log_prob, len(self.ids), penalty)


def scored(log_prob: float, length: int, penalty: float) -> float:
    """Return log_prob / length**penalty, as transformers scores beams."""
    return log_prob / float(max(length, 1) ** penalty)


def top_indices(scores: np.ndarray, num_indices: int) -> np.ndarray:
    """Return the indices of the largest scores, descending; equal scores stay in order."""
    if num_indices < len(scores):
        indices = np.flatnonzero(scores >= np.partition(scores, -num_indices)[-num_indices])
    else:
        indices = np.arange(len(scores))
    return indices[np.argsort(-scores[indices], kind="stable")][:num_indices]


class BeamSearch:
    """A beam search in sequences 0 … of a context; `run` returns the best beams, the best first.

    reading, writing  speeds of the prompt, and of all beams together
    """

    def __init__(
        self, context: Context, tokenizer: Tokenizer, prompt: Sequence[int], search_config: BeamSearchConfig,
        limits: GenerationLimits,
    ) -> None:  # fmt: skip
        check_prompt(prompt, context.cache.num_cells)
        self._context, self._tokenizer, self._search = context, tokenizer, search_config
        # beams that repeat themselves go on
        self._limits, self.prompt = replace(limits, loop_tokens=0), tuple(prompt)
        self.reading, self.writing = Speed(), Speed()
        self._finished_beams = list[Beam]()

    def run(self) -> list[Beam]:
        """Search, and return the best beams: fewer than `num_beams` only if there are no more."""
        start_time, context = time.perf_counter(), self._context
        num_reused = context.reuse(0, self.prompt)
        logits = context.decode(self.prompt[num_reused:], 0)
        self.reading.add(len(self.prompt) - num_reused, time.perf_counter() - start_time)
        active, self._finished_beams = [Beam()], []
        while not (stop_reason := self._stop_reason(active)):
            start_time = time.perf_counter()
            if active[0].ids:
                tokens, seqs = [beam.ids[-1] for beam in active], [beam.seq for beam in active]
                logits = context.decode(tokens, seqs, wanted=range(len(seqs)))
            active = self._assign_sequences(self._next_beams(active, logits))
            self.writing.add(len(logits), time.perf_counter() - start_time)
        if stop_reason != "found":
            self._keep_best_finished([replace(beam, end_reason=stop_reason) for beam in active])
        return self._finished_beams

    def beam_text(self, beam: Beam) -> str:
        """Return the text of a beam, without the stop text or token that ended it."""
        return self._decode_beam(beam)[0]

    def _decode_beam(self, beam: Beam) -> tuple[str, bool]:
        """Return the text of a beam, and whether a stop text ends it."""
        text_filter, stream = StopTextFilter(self._limits.stops), StreamDecoder(self._tokenizer)
        for id in self.prompt:  # so that the space before the first word is part of the text
            stream.feed(id)
        text = ""
        for id in beam.ids[: -1 if beam.end_reason == "end" else None]:
            text += text_filter.add(stream.feed(id))
            if text_filter.is_stopped:
                return text, True
        return text + text_filter.add(stream.flush()) + text_filter.flush(), text_filter.is_stopped

    def _next_beams(self, active_beams: list[Beam], logits: np.ndarray) -> list[Beam]:
        """Return the likeliest beams that are one token longer, by logits (beams, V); ended ones become finished."""
        beam_width = self._search.width
        next_beams, finished_beams = list[Beam](), list[Beam]()
        for beam_rank, beam in enumerate(self._extend_beams(active_beams, logits)):
            reason = "end" if beam.ids[-1] in self._tokenizer.eog_ids else ""
            if not reason and self._limits.stops and self._decode_beam(beam)[1]:
                reason = "stop"
            if reason and beam_rank < beam_width:
                finished_beams.append(replace(beam, end_reason=reason))
            if not reason and len(next_beams) < beam_width:
                next_beams.append(beam)
        self._keep_best_finished(finished_beams)
        return next_beams

    def _extend_beams(self, active_beams: list[Beam], logits: np.ndarray) -> list[Beam]:
        """Extend beams by a token, by logits (beams, V); return the likeliest, at least `width` of them not ended."""
        count, candidates = (1 + len(self._tokenizer.eog_ids)) * self._search.width, list[Beam]()
        for beam, row_logits in zip(active_beams, logits, strict=True):
            biased_logits = row_logits.copy()
            for id, bias in self._search.logit_bias.items():
                biased_logits[id] += bias
            token_scores = beam.log_prob + log_probabilities(biased_logits)
            candidates += [
                Beam((*beam.ids, int(id)), float(token_scores[id]), beam.seq)
                for id in top_indices(token_scores, count)
                if token_scores[id] > -np.inf
            ]
        return sorted(candidates, key=lambda beam: -beam.log_prob)[:count]

    def _keep_best_finished(self, finished: list[Beam]) -> None:
        ranked_beams = sorted(
            (*self._finished_beams, *finished), key=lambda beam: -beam.score(self._search.penalty)
        )
        self._finished_beams = ranked_beams[: self._search.num_beams]

    def _assign_sequences(self, beams: list[Beam]) -> list[Beam]:
        """Return beams with a sequence each: the first that extends a text keeps its sequence, others get a copy."""
        live_seqs, context, placed_beams = {beam.seq for beam in beams}, self._context, list[Beam]()
        free_seqs = [seq for seq in range(self._search.width) if seq not in live_seqs]
        for seq in free_seqs:
            context.remove(seq)
        for beam in beams:
            seq = beam.seq
            if seq in live_seqs:
                live_seqs.remove(seq)
            else:
                seq = free_seqs.pop(0)
                context.copy(beam.seq, seq)
            placed_beams.append(replace(beam, seq=seq))
        return placed_beams

    def _stop_reason(self, active_beams: list[Beam]) -> str:
        """Return why the search is over: "found", or GenerationLimits' reason to end all beams; "" if it goes on."""
        if not active_beams:
            return "found"
        length = len(active_beams[0].ids)
        num_free = int(np.count_nonzero(self._context.pools.all.sets == 0))
        is_full = length > 0 and num_free < len(active_beams)
        if reason := self._limits.end_reason(active_beams[0].ids, False, is_full):
            return reason
        return "found" if self._is_settled(active_beams, length) else ""

    def _is_settled(self, active_beams: list[Beam], length: int) -> bool:
        """Return whether no active beam, now of `length` tokens, can become better than the finished ones."""
        length_penalty, num_beams = self._search.penalty, self._search.num_beams
        if len(self._finished_beams) < num_beams:
            return False
        if self._search.width == 1:  # greedy: the likeliest token ends the text
            return True
        max_length = self._context.cache.num_cells - len(self.prompt) + 1
        if self._limits.max_tokens >= 0:
            max_length = min(max_length, self._limits.max_tokens)
        best = max(beam.log_prob for beam in active_beams)
        score_bound = scored(best, max_length if length_penalty > 0 else length + 1, length_penalty)
        return score_bound <= self._finished_beams[-1].score(length_penalty)
