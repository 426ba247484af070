"""Settings of the samplers: flags, names, order and defaults are llama.cpp's (common/common.h, common/arg.cpp)."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from types import MappingProxyType

from packtrain.common.errors import InputError, name_keywords
from packtrain.common.options import SAMPLING, check_values
from packtrain.common.text import did_you_mean

# tfs_z stands where llama.cpp had it until it was removed
SAMPLER_ORDER = (
    "penalties", "dry", "top_n_sigma", "top_k", "tfs_z", "typ_p", "top_p", "min_p", "xtc",
    "temperature",
)  # fmt: skip
ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p", "typical": "typ_p"}
OPTIONAL = "infill"  # in no default, but all clients of /infill name it
BIAS_PATTERN = re.compile(r"(\d+)([+-])(.+)")
MAX_SETTING = 1e30  # with larger settings sums are no longer finite
DEFAULT_BREAKERS = ("\n", ":", '"', "*")


@name_keywords
@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; each field is a flag of `generate` and `chat`."""

    samplers: str = SAMPLING(";".join(SAMPLER_ORDER), "samplers in order, separated by ;")
    temp: float = SAMPLING(
        0.8, "temperature; 0 always picks the likeliest token", flags="--temperature", min_value=0
    )
    dynatemp_range: float = SAMPLING(
        0.0, "the temperature varies by this much with the entropy; 0: it is fixed", min_value=0
    )
    dynatemp_exp: float = SAMPLING(1.0, "exponent from entropy to temperature", min_value=0)
    top_k: int = SAMPLING(40, "sample from the N likeliest tokens; 0: from all", min_value=0)
    top_p: float = SAMPLING(
        0.95, "sample from the likeliest tokens whose probabilities add up to this", min_value=0, max_value=1,
    )  # fmt: skip
    min_p: float = SAMPLING(
        0.05, "drop tokens less likely than this share of the likeliest", min_value=0, max_value=1
    )
    top_n_sigma: float = SAMPLING(
        -1.0, "drop logits more than this many standard deviations below the largest; -1: none", max_value=MAX_SETTING,
        flags="--top-nsigma",
    )  # fmt: skip
    typical: float = SAMPLING(
        1.0, "keep tokens of typical surprise whose probabilities add up to this; 1: all", flags="--typical-p",
        min_value=0, max_value=1,
    )  # fmt: skip
    tfs: float = SAMPLING(1.0, "tail-free sampling keeps this share; 1: all", min_value=0, max_value=1)  # fmt: skip
    xtc_probability: float = SAMPLING(
        0.0, "how often the likeliest tokens are excluded; 0: never", min_value=0, max_value=1
    )
    xtc_threshold: float = SAMPLING(
        0.1, "all but the last of the tokens this likely are excluded; over 0.5: none", min_value=0
    )
    repeat_penalty: float = SAMPLING(
        1.0, "penalty on recent tokens; 1: none", min_value=0.01, max_value=MAX_SETTING
    )
    frequency_penalty: float = SAMPLING(
        0.0, "penalty for each time that a token is recent", min_value=-MAX_SETTING, max_value=MAX_SETTING,
    )  # fmt: skip
    presence_penalty: float = SAMPLING(
        0.0, "penalty on recent tokens, however often they are", min_value=-MAX_SETTING, max_value=MAX_SETTING,
    )  # fmt: skip
    repeat_last_n: int = SAMPLING(64, "how many tokens count as recent; -1: all", min_value=-1)
    dry_multiplier: float = SAMPLING(
        0.0, "DRY: penalty on tokens that extend a repetition; 0: none", min_value=0, max_value=MAX_SETTING,
    )  # fmt: skip
    dry_base: float = SAMPLING(1.75, "DRY: the penalty grows by this for each token repeated", min_value=1)  # fmt: skip
    dry_allowed_length: int = SAMPLING(2, "DRY: repetitions this long are free", min_value=0)
    dry_penalty_last_n: int = SAMPLING(64, "DRY: how many tokens are searched; -1: all", min_value=-1)  # fmt: skip
    dry_sequence_breaker: tuple[str, ...] = SAMPLING(
        (), "DRY: text that ends repetitions; repeatable; none: no text (default: line feed, :, quote, *)",
    )  # fmt: skip
    mirostat: int = SAMPLING(0, "1 or 2: Mirostat instead of the other samplers", min_value=0, max_value=2)  # fmt: skip
    mirostat_lr: float = SAMPLING(0.1, "Mirostat's learning rate, eta", min_value=0)
    mirostat_ent: float = SAMPLING(5.0, "Mirostat's target of surprise, tau, in bits", min_value=0)
    logit_bias: tuple[str, ...] = SAMPLING(
        (), "add to a token's logit; 29905-inf forbids it; repeatable", flags="-l", metavar="ID(+|-)X",
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Raise InputError for a value out of its range, also where no command line has checked it."""
        field_values = {field.name: getattr(self, field.name) for field in fields(Sampling)}
        for name, value in check_values(Sampling, field_values, None).items():
            object.__setattr__(self, name, value)

    @property
    def sampling(self) -> "Sampling":
        """These settings alone, without those that a derived class adds."""
        return Sampling(**{field.name: getattr(self, field.name) for field in fields(Sampling)})

    @property
    def order(self) -> tuple[str, ...]:
        """The samplers' names in the order in which they apply. Raises InputError for an unknown one."""
        return parse_samplers(self.samplers)

    @property
    def breakers(self) -> tuple[str, ...]:
        """Texts that end DRY's repetitions; () for none."""
        sequences = self.dry_sequence_breaker or DEFAULT_BREAKERS
        return () if "none" in sequences else sequences

    @property
    def biases(self) -> Mapping[int, float]:
        """What --logit-bias adds to logits, by token id. Raises InputError."""
        bias_by_id: dict[int, float] = {}
        for text in self.logit_bias:
            token_id, bias = parse_bias(text)
            bias_by_id[token_id] = bias_by_id.get(token_id, 0.0) + bias
        return MappingProxyType(bias_by_id)

    def check_sampling(self, vocab_size: int | None = None) -> None:
        """Raise InputError if samplers or biases cannot be parsed, or a bias is for no token below `vocab_size`."""
        self.order  # noqa: B018
        worst = max(self.biases, default=0)
        if vocab_size is not None and worst >= vocab_size:
            fact = f"--logit-bias: there is no token {worst}; the vocabulary has {vocab_size:,}"
            raise InputError(fact)


@lru_cache(maxsize=64)
def parse_samplers(names: str) -> tuple[str, ...]:
    """Parse names of samplers separated by `;` into names of SAMPLER_ORDER. Raises InputError."""
    return tuple(canonical_name(name) for name in names.split(";") if name.strip())


def canonical_name(sampler_name: str) -> str:
    """Return the name that SAMPLER_ORDER has for a sampler: top_k for top-k and topk. Raises InputError."""
    normalized = sampler_name.strip().lower()
    names = *SAMPLER_ORDER, OPTIONAL
    canonical_names = {sampler.replace("_", ""): sampler for sampler in names} | ALIASES
    sampler = canonical_names.get(normalized.replace("-", "").replace("_", ""))
    if sampler is None:
        suggestion = did_you_mean(normalized, names)
        fact = f"--samplers: there is no sampler {sampler_name!r}"
        raise InputError(f"{fact}; there are {', '.join(names)}{suggestion}")
    return sampler


def parse_bias(text: str) -> tuple[int, float]:
    """Parse a bias such as `15043+1` into token and number. Raises InputError."""
    match = BIAS_PATTERN.fullmatch(text.strip())
    try:
        bias = float(match[2] + match[3]) if match else math.nan
    except ValueError:
        bias = math.nan
    if match is None or not (abs(bias) <= MAX_SETTING or bias == -math.inf):
        fact = f"--logit-bias is {text!r}; it must be like 15043+1.5, 15043-1 or 15043-inf"
        raise InputError(fact)
    return int(match[1]), bias
