"""Reading the JSON of a request. What clients may say is llama-server's and OpenAI's; unknown fields are ignored."""

import dataclasses
import math
import secrets
from collections.abc import Sequence
from typing import Any

from packtrain.common.errors import InputError
from packtrain.data.tokenizer import Tokenizer
from packtrain.inference.sampling import Sampling

# fields of a request that are not called like the sampler's setting
NAMES = {
    "temperature": "temp",
    "dynatemp_exponent": "dynatemp_exp",
    "typical_p": "typical",
    "mirostat_tau": "mirostat_ent",
    "mirostat_eta": "mirostat_lr",
    "dry_sequence_breakers": "dry_sequence_breaker",
}
OWN = {"samplers", "logit_bias", "dry_sequence_breaker"}  # which are read in another way
SETTINGS = {field.name: field for field in dataclasses.fields(Sampling)}
FIELDS = {name: name for name in SETTINGS if name not in (*NAMES.values(), *OWN)} | NAMES
KINDS = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}
MOST_BIAS, MOST_STOPS, MOST_TOP, MOST_ANSWERS = 10_000, 64, 20, 32
LONGEST_GRAMMAR, LONGEST_SAMPLERS = 1 << 16, 1 << 10  # characters
MOST_SEED = 2**63 - 1
LARGEST = 1e300  # what is larger is no number that anyone means


class Body:
    """The JSON object of a request; null is as if a field were not there. All raise InputError that names the field."""

    def __init__(self, values: Any, where: str = "") -> None:
        if not isinstance(values, dict):
            raise InputError(f"{where or 'the body'} must be a JSON object")
        self._values, self._where = values, f"{where}." if where else ""

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def has(self, *names: str) -> bool:
        return any(self._values.get(name) is not None for name in names)

    def _typed(self, name: str, kind: type) -> Any:
        value = self._values[name]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < 1e300 else math.inf
        is_integral = kind is int and isinstance(value, float) and value.is_integer()
        value = int(value) if is_integral else value
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise InputError(f"{self._where}{name} must be {KINDS[kind]}")
        return value

    def number(
        self, name: str, default: Any, min_value: float = -math.inf, max_value: float = math.inf
    ) -> Any:
        """A number of the type of the default."""
        if not self.has(name):
            return default
        value = self._typed(name, type(default))
        if abs(value) > LARGEST:
            raise InputError(f"{self._where}{name} is too large")
        if not (math.isfinite(value) and min_value <= value <= max_value):
            bounds = [
                f"{side} {_shown(limit)}"
                for side, limit in (("at least", min_value), ("at most", max_value))
                if math.isfinite(limit)
            ]
            raise InputError(
                f"{self._where}{name} is {_shown(value)}; it must be {' and '.join(bounds) or 'finite'}"
            )
        return value

    def text(self, name: str, default: str = "", longest: int = 1 << 20) -> str:
        if not self.has(name):
            return default
        value: str = self._typed(name, str)
        if len(value) > longest:
            raise InputError(f"{self._where}{name} has more than {longest:,} characters")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self._typed(name, bool)) if self.has(name) else default

    def object(self, name: str) -> dict[str, Any]:
        """A JSON object; empty if there is none."""
        value = self.get(name) if self.has(name) else {}
        if not isinstance(value, dict):
            raise InputError(f"{self._where}{name} must be a JSON object")
        return value

    def listed(self, name: str, max_length: int) -> list[Any]:
        """A list of at most so many values; empty if there is none."""
        value = self.get(name) if self.has(name) else []
        if not isinstance(value, list):
            raise InputError(f"{self._where}{name} must be a list")
        if len(value) > max_length:
            raise InputError(
                f"{self._where}{name} has {len(value):,} values; at most {max_length:,}"
            )
        return value

    def texts(self, name: str, max_length: int) -> tuple[str, ...]:
        """One text, or a list of them."""
        if isinstance(self.get(name), str):
            return (self.text(name),)
        values = self.listed(name, max_length)
        if not all(isinstance(text, str) for text in values):
            raise InputError(f"{self._where}{name} must be text, or a list of texts")
        return tuple(values)


def stops_of(body: Body) -> tuple[str, ...]:
    return tuple(text for text in body.texts("stop", MOST_STOPS) if text)


def seed_of(body: Body, default: int) -> int:
    """Seed of the samplers; -1: a new one each time."""
    seed: int = body.number("seed", default, -MOST_SEED, MOST_SEED)
    return secrets.randbits(32) if seed == -1 else abs(seed)


def sampling_of(body: Body, defaults: Sampling, tokenizer: Tokenizer) -> Sampling:
    """How tokens are chosen: what a request says, over the server's settings."""
    changed = dict[str, Any]()
    for name, setting in FIELDS.items():
        if setting not in OWN and body.has(name):
            field = SETTINGS[setting]
            lower, upper = field.metadata.get("bounds", (None, None))
            kind = float(0) if field.type in (float, "float") else 0
            bounds = (-math.inf if lower is None else lower, math.inf if upper is None else upper)
            if setting == "top_k":  # below zero it is off, as in llama-server: clients send -1
                changed[setting] = max(body.number(name, kind), 0)
            else:
                changed[setting] = body.number(name, kind, *bounds)
    if body.has("samplers"):
        samplers = body.get("samplers")
        named = samplers if isinstance(samplers, str) else ";".join(body.texts("samplers", 32))
        if len(named) > LONGEST_SAMPLERS:
            raise InputError(f"samplers has more than {LONGEST_SAMPLERS:,} characters")
        changed["samplers"] = named
    if body.has("dry_sequence_breakers"):
        changed["dry_sequence_breaker"] = body.texts("dry_sequence_breakers", 64) or ("none",)
    if body.has("logit_bias"):
        biases = biases_of(body.get("logit_bias"), tokenizer)
        changed["logit_bias"] = (*defaults.logit_bias, *biases)
    sampling = dataclasses.replace(defaults, **changed)
    sampling.check_sampling(tokenizer.vocab_size)
    return sampling


def biases_of(logit_bias: Any, tokenizer: Tokenizer) -> list[str]:
    """`{"id": bias}`, or `[[id or text, bias]]`; false forbids a token. As the setting has them: 15043+1."""
    pairs = [*logit_bias.items()] if isinstance(logit_bias, dict) else logit_bias
    if not isinstance(pairs, list) or len(pairs) > MOST_BIAS:
        raise InputError(f"logit_bias must be an object or a list of at most {MOST_BIAS:,} pairs")
    biases = list[str]()
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InputError("logit_bias: each value must be a pair of a token and a number")
        token, bias = pair
        bias = -math.inf if bias is False else bias
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not bias < LARGEST:
            raise InputError("logit_bias: a bias must be a number, or false")
        biases += [f"{id}{float(bias):+}" for id in ids_of(token, tokenizer)]
        if len(biases) > MOST_BIAS:
            raise InputError(f"logit_bias has more than {MOST_BIAS:,} tokens")
    return biases


def ids_of(token: Any, tokenizer: Tokenizer) -> list[int]:
    """A token's id, as a number or in text, or the ids of a text."""
    if isinstance(token, str) and token.isdecimal() and len(token) < 10:
        token = int(token)
    if isinstance(token, str):
        return tokenizer.encode(token[:1000], bos=False, eos=False, special=False)
    if isinstance(token, bool) or not isinstance(token, int):
        raise InputError("logit_bias: a token must be an id or a text")
    if not 0 <= token < tokenizer.vocab_size:
        raise InputError(
            f"logit_bias: there is no token {token}; the vocabulary has {tokenizer.vocab_size:,}"
        )
    return [token]


def prompts_of(
    value: Any, tokenizer: Tokenizer, max_prompts: int, name: str = "prompt"
) -> list[list[int]]:
    """Token ids of one prompt or several: each a text, or a list of ids and texts; `name` is the field's."""
    if value is None:
        raise InputError(f"'{name}' is required")
    parts = value if isinstance(value, list) else []
    nested = any(isinstance(part, list | dict) for part in parts)
    texts = len(parts) > 1 and all(isinstance(part, str) for part in parts)
    prompts = parts if nested or texts else [value]
    if len(prompts) > max_prompts:
        raise InputError(f"{name} has {len(prompts)} texts; at most {max_prompts}")
    return [prompt_of(prompt, tokenizer, name) for prompt in prompts]


def prompt_of(prompt: Any, tokenizer: Tokenizer, name: str = "prompt") -> list[int]:
    """Token ids of a text, of a list of ids and texts, or of {"prompt_string": text}."""
    if isinstance(prompt, dict) and isinstance(prompt.get("prompt_string"), str):
        if prompt.get("multimodal_data"):
            raise InputError("multimodal_data: this model reads text only")
        prompt = prompt["prompt_string"]
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, eos=False)
    if not isinstance(prompt, list) or not prompt:
        raise InputError(f"{name} must be a text, or a list of token ids and texts")
    ids = list[int]()
    for i, part in enumerate(prompt):
        if isinstance(part, str):
            ids += tokenizer.encode(part, bos=None if i == 0 else False, eos=False)
        elif (
            isinstance(part, int)
            and not isinstance(part, bool)
            and 0 <= part < tokenizer.vocab_size
        ):
            ids.append(part)
        else:
            raise InputError(
                f"{name}[{i}] must be a text or a token id below {tokenizer.vocab_size:,}"
            )
    return ids


def adapters_of(entries: Any, defaults: Sequence[float]) -> tuple[float, ...]:
    """The scale of each adapter: [{"id": 0, "scale": 0.5}]; those not named have 0, as in llama-server."""
    if entries is None:
        return tuple(defaults)
    if not isinstance(entries, list):
        raise InputError('lora must be a list like [{"id": 0, "scale": 1.0}]')
    scales = [0.0] * len(defaults)
    for entry in entries:
        body = Body(entry, "lora")
        id = body.number("id", -1)
        if not 0 <= id < len(scales):
            raise InputError(f"lora: there is no adapter {id}; there are {len(scales)}")
        scales[id] = body.number("scale", 0.0, -1e6, 1e6)
    return tuple(scales)


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
