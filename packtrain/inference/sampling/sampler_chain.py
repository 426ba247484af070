"""The chain of samplers of one sequence: its settings, the recent tokens, mirostat's mu."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from packtrain.common.errors import InputError, name_keywords
from packtrain.inference.sampling import samplers
from packtrain.inference.sampling.candidate_cuts import SamplerCut, base_cut, token_cut
from packtrain.inference.sampling.dry import Breakers, dry_penalty
from packtrain.inference.sampling.samplers import Candidates, mirostat, mirostat_2, update_mu
from packtrain.inference.sampling.sampling_settings import Sampling


class Constraint(Protocol):
    """A constraint on the tokens that can come, such as a grammar."""

    @property
    def over(self) -> bool:
        """Whether no more tokens can come."""

    def allowed(self, size: int) -> np.ndarray | None:
        """Return the mask (size,) bool of tokens that can come; None: all."""

    def accept(self, id: int) -> None:
        """Advance the constraint by the token that the text got."""

    def copy(self) -> "Constraint":
        """Return an independent constraint in the same state."""


# a result that leaves the device: the token, candidates or all logits
SamplerInput = int | Candidates | np.ndarray
InfillTokens = tuple[Callable[[int], bytes], Sequence[int]]
SamplerStep = Callable[["Chain", Candidates, np.random.Generator], Candidates]
SAMPLER_STEPS: dict[str, SamplerStep] = {
    "penalties": lambda chain, c, rng: chain.penalised(c),
    "dry": lambda chain, c, rng: chain.dried(c),
    "top_n_sigma": lambda chain, c, rng: samplers.top_n_sigma(c, chain.sampling.top_n_sigma),
    "top_k": lambda chain, c, rng: samplers.top_k(c, chain.sampling.top_k),
    "tfs_z": lambda chain, c, rng: samplers.tail_free(c, chain.sampling.tfs),
    "typ_p": lambda chain, c, rng: samplers.typical(c, chain.sampling.typical),
    "top_p": lambda chain, c, rng: samplers.top_p(c, chain.sampling.top_p),
    "min_p": lambda chain, c, rng: samplers.min_p(c, chain.sampling.min_p),
    "xtc": lambda chain, c, rng: samplers.xtc(
        c, chain.sampling.xtc_probability, chain.sampling.xtc_threshold, rng
    ),
    "infill": lambda chain, c, rng: samplers.infill(c, *chain.infill_tokens),
    "temperature": lambda chain, c, rng: samplers.dynamic_temperature(
        c, chain.sampling.temp, chain.sampling.dynatemp_range, chain.sampling.dynatemp_exp
    ),
}


@name_keywords
class Chain:
    """The samplers of one sequence. `choose` the next token, then `accept` it; `copy` for a fork of the sequence."""

    def __init__(
        self, sampling: Sampling, seed: int = 0, recent: Iterable[int] = (), breakers: Breakers | None = None,
        constraint: Constraint | None = None, infill_tokens: InfillTokens = (lambda id: b"", ()),
    ) -> None:  # fmt: skip
        """Create a chain, with a copy of `constraint`. recent: tokens before the first one chosen; breakers: of DRY, by
        `find_breakers`; infill_tokens: (function from id to text, ids that end a gap). Raises InputError."""
        self._constraint = constraint.copy() if constraint else None
        self.sampling: Sampling = sampling
        self.seed, self.index = seed, 0
        self.whole = False  # whether all logits must leave the device
        self.recent, self.mu = [*recent], 2 * sampling.mirostat_ent
        self._breakers, self._biases = breakers or {}, sampling.biases
        self.infill_tokens: InfillTokens = infill_tokens
        self._sampler_steps = [SAMPLER_STEPS[name] for name in sampling.order]
        self._place = SamplerCut() if constraint else base_cut(sampling)  # grammars need all logits

    def copy(self) -> "Chain":
        """Return an independent chain in the same state."""
        tokens = self._breakers, self._constraint, self.infill_tokens
        duplicate = Chain(self.sampling, self.seed, self.recent, *tokens)
        duplicate.index, duplicate.mu, duplicate.whole = self.index, self.mu, self.whole
        return duplicate

    @property
    def over(self) -> bool:
        """Whether the grammar allows no more tokens."""
        return self._constraint is not None and self._constraint.over

    def cut(self, ahead: int = 0) -> SamplerCut:
        """Return how far the graph samples the token `ahead` after the next: to logits, candidates or the token."""
        if self.whole:
            return SamplerCut()
        return token_cut(self._place, self.sampling, self.seed, self.index + ahead)

    def choose(self, result: SamplerInput) -> int:
        """Choose the next token from logits (of equal ones the lowest id), candidates or a token. Raises InputError."""
        if isinstance(result, np.ndarray):
            return self._draw_next(self._allowed(result), len(result))
        if isinstance(result, Candidates):
            check_finite_logits(result.ids[:1], result.logits[:1])
            return self._draw_next(result, len(result.ids))
        if result < 0:
            raise not_finite_error(-1 - result)
        return result

    def _allowed(self, logits: np.ndarray) -> Candidates:
        """Return the candidates that the grammar allows, or all tokens. Raises InputError."""
        all_ids = np.arange(len(logits))
        check_finite_logits(all_ids, logits)
        allowed = self._constraint.allowed(len(logits)) if self._constraint else None
        ids = all_ids if allowed is None else np.flatnonzero(allowed)
        return Candidates(ids, logits[ids].astype(np.float64))

    def remaining_candidates(self, logits: np.ndarray) -> Candidates:
        """Return the candidates that the samplers leave, from which `choose` would draw. Raises InputError."""
        rng = samplers.token_rng(self.seed, self.index)
        return self._filter(self._allowed(logits), len(logits), rng)

    def _draw_next(self, c: Candidates, vocab_size: int) -> int:
        """Apply the samplers to candidates and return the token that is drawn from the rest."""
        rng = samplers.token_rng(self.seed, self.index)
        c = self._filter(c, vocab_size, rng)
        id = samplers.draw_token(c, rng)
        if (s := self.sampling).mirostat:
            self.mu = update_mu(c, id, self.mu, s.mirostat_ent, s.mirostat_lr)
        return id

    def _filter(self, c: Candidates, vocab_size: int, rng: np.random.Generator) -> Candidates:
        """Return the candidates that biases and samplers leave. Raises InputError if no token is left."""
        if self._biases:
            c = samplers.logit_bias(c, self._biases)
            c = c.select(c.logits > -np.inf)
        if not len(c.ids):
            fact = "no token is left that could come next: see --logit-bias and --grammar"
            raise InputError(fact)
        if self.sampling.mirostat:
            c = samplers.temperature(c, self.sampling.temp)
            is_version_1 = self.sampling.mirostat == 1
            return mirostat(c, self.mu, vocab_size) if is_version_1 else mirostat_2(c, self.mu)
        for sampler_step in self._sampler_steps:
            c = sampler_step(self, c, rng)
        return c

    def accept(self, id: int) -> None:
        """Record the token that the text got, chosen by this chain or not."""
        self.recent.append(id)
        self.index += 1
        if self._constraint:
            self._constraint.accept(id)

    def last(self, count: int) -> Sequence[int]:
        """Return the last `count` tokens; -1: all."""
        return self.recent if count < 0 else self.recent[max(len(self.recent) - count, 0) :]

    def penalised(self, c: Candidates) -> Candidates:
        """Return candidates with repeat, frequency and presence penalties on recent tokens."""
        s = self.sampling
        penalty_args = s.repeat_penalty, s.frequency_penalty, s.presence_penalty
        return samplers.recent_penalties(c, self.last(s.repeat_last_n), *penalty_args)

    def dried(self, c: Candidates) -> Candidates:
        """Return candidates with DRY's penalty on repetitions."""
        settings = self.sampling
        dry_args = settings.dry_multiplier, settings.dry_base, settings.dry_allowed_length
        return dry_penalty(c, self.last(settings.dry_penalty_last_n), self._breakers, *dry_args)


def check_finite_logits(ids: np.ndarray, logits: np.ndarray) -> None:
    """Raise InputError if a logit is not finite."""
    is_finite = np.isfinite(logits)
    if not is_finite.all():
        raise not_finite_error(int(ids[~is_finite][0]))


def not_finite_error(id: int) -> InputError:
    fact = f"the logit of token {id} is not finite"
    return InputError(f"{fact}; the model's weights must give finite numbers")
