"""Reading the JSON of a request. Fields are llama-server's and OpenAI's; unknown fields are ignored.

Fields that change answers of other servers, and would change none here, are refused."""

import dataclasses
import json
import math
from collections.abc import Collection, Sequence
from importlib import resources
from typing import Any

from packtrain.common.errors import InputError
from packtrain.data.tokenizer import Tokenizer
from packtrain.inference.sampling import Sampling

# fields of a request whose names differ from the sampler's settings
FIELD_ALIASES = {
    "temperature": "temp", "dynatemp_exponent": "dynatemp_exp", "typical_p": "typical", "mirostat_tau": "mirostat_ent",
    "mirostat_eta": "mirostat_lr", "dry_sequence_breakers": "dry_sequence_breaker",
}  # fmt: skip
CUSTOM_SETTINGS = {"samplers", "logit_bias", "dry_sequence_breaker"}  # parsed by code of their own
SETTING_FIELDS = {field.name: field for field in dataclasses.fields(Sampling)}
FIELDS = {
    name: name for name in SETTING_FIELDS if name not in (*FIELD_ALIASES.values(), *CUSTOM_SETTINGS)
} | FIELD_ALIASES
TYPE_NAMES = {
    float: "a number", int: "a whole number", str: "text", bool: "true or false", dict: "a JSON object", list: "a list"
}  # fmt: skip
MAX_BIASES, MAX_STOP_TEXTS, MOST_TOP, MAX_ANSWERS = 10_000, 64, 20, 32
MAX_GRAMMAR_CHARS, MAX_SAMPLERS_CHARS = 1 << 16, 1 << 10  # characters
MAX_SEED = 2**63 - 1
# by kind of request: what to do instead of sending fields that have no effect here
UNMET_FIELDS: dict[str, dict[str, list[str]]] = json.loads(
    resources.files("packtrain.serving").joinpath("unmet_fields.json").read_text("utf-8")
)
# values that ask for nothing, and those of fields for which others do
IDLE_VALUES: tuple[Any, ...] = None, False, 0, -1, "", [], {}
IDLE_VALUES_BY_FIELD: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "n_cmpl", "best_of", "length_penalty", "repetition_penalty"), (None, 1)),
    **dict.fromkeys(("enable_thinking", "think", "functions", "web_search_options"), (None,)),
    "modalities": (None, ["text"]), "verbosity": (None, "medium"), "num_beams": (None, 1), "guidance_scale": (None, 1),
    **dict.fromkeys(("do_sample", "normalize"), (None, True)),
    "context_management": (None, [], {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
}  # fmt: skip
MAX_NUMBER = 1e300  # larger numbers are refused


class JsonBody:
    """The JSON object of a request; null counts as missing. Methods raise InputError, which names the field."""

    def __init__(self, json_object: Any, field_path: str = "") -> None:
        if not isinstance(json_object, dict):
            raise InputError(f"{field_path or 'the body'} must be a JSON object")
        self._json_object, self._path_prefix = json_object, f"{field_path}." if field_path else ""

    def get(self, name: str) -> Any:
        return self._json_object.get(name)

    def path(self, name: str) -> str:
        """Return a field's path in the body, such as messages[0].role."""
        return f"{self._path_prefix}{name}"

    def fact(self, name: str, words: str) -> str:
        """Return a sentence about a field: its path and `words`."""
        return f"{self.path(name)} {words}"

    def replaced(self, removed: Collection[str], fields: dict[str, Any]) -> "JsonBody":
        """Return a copy of the object without the fields `removed`, and with `fields` in addition."""
        remaining_fields = {name: x for name, x in self._json_object.items() if name not in removed}
        return JsonBody(remaining_fields | fields)

    def has(self, *field_names: str) -> bool:
        return any(self._json_object.get(name) is not None for name in field_names)

    def _typed_value(self, name: str, kind: type) -> Any:
        value = self._json_object[name]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < 1e300 else math.inf
        is_integral = kind is int and isinstance(value, float) and value.is_integer()
        value = int(value) if is_integral else value
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise InputError(self.fact(name, f"must be {TYPE_NAMES[kind]}"))
        return value

    def number(
        self, name: str, default: Any, min_value: float = -math.inf, max_value: float = math.inf
    ) -> Any:
        """Return a field's number, of the type of `default`, or `default` if it is missing; both bounds are allowed."""
        if not self.has(name):
            return default
        value = self._typed_value(name, type(default))
        if abs(value) > MAX_NUMBER:
            raise InputError(self.fact(name, "is too large"))
        if not (math.isfinite(value) and min_value <= value <= max_value):
            bounds = ("at least", min_value), ("at most", max_value)
            limits = [f"{words} {_format_number(x)}" for words, x in bounds if math.isfinite(x)]
            fact = f"is {_format_number(value)}; it must be {' and '.join(limits) or 'finite'}"
            raise InputError(self.fact(name, fact))
        return value

    def text(self, name: str, default: str = "", max_length: int = 1 << 20) -> str:
        if not self.has(name):
            return default
        value: str = self._typed_value(name, str)
        if len(value) > max_length:
            raise InputError(self.fact(name, f"has more than {max_length:,} characters"))
        return value

    def refuse_unmet(self, kind: str) -> None:
        """Raise InputError for a field that has no effect here but asks for something; kind: a key of UNMET_FIELDS."""
        for advice, field_names in UNMET_FIELDS[kind].items():
            for name in field_names:
                if self.get(name) not in IDLE_VALUES_BY_FIELD.get(name, IDLE_VALUES):
                    raise InputError(self.fact(name, "is not supported"), advice)

    def get_flag(self, name: str, default: bool = False) -> bool:
        return bool(self._typed_value(name, bool)) if self.has(name) else default

    def get_object(self, name: str) -> dict[str, Any]:
        """Return a field's JSON object; {} if the field is missing."""
        return dict(self._typed_value(name, dict)) if self.has(name) else {}

    def get_list(self, name: str, max_length: int) -> list[Any]:
        """Return a field's list of at most `max_length` values; [] if the field is missing."""
        value: list[Any] = self._typed_value(name, list) if self.has(name) else []
        if len(value) > max_length:
            raise InputError(self.fact(name, f"has {len(value):,} values; at most {max_length:,}"))
        return value

    def get_texts(self, name: str, max_length: int) -> tuple[str, ...]:
        """Return a field's texts, given as one text or a list; () if the field is missing."""
        if isinstance(self.get(name), str):
            return (self.text(name),)
        text_list = self.get_list(name, max_length)
        if not all(isinstance(text, str) for text in text_list):
            raise InputError(self.fact(name, "must be text, or a list of texts"))
        return tuple(text_list)


def parse_sampling(body: JsonBody, defaults: Sampling, tokenizer: Tokenizer) -> Sampling:
    """Return the server's sampling settings, `defaults`, changed by the fields of a request. Raises InputError."""
    changed = dict[str, Any]()
    for name, setting in FIELDS.items():
        if setting not in CUSTOM_SETTINGS and body.has(name):
            setting_field = SETTING_FIELDS[setting]
            lower, upper = setting_field.metadata.get("bounds", (None, None))
            type_default = float(0) if setting_field.type in (float, "float") else 0
            bounds = (-math.inf if lower is None else lower, math.inf if upper is None else upper)
            if setting == "top_k":  # below zero it is off, as in llama-server: clients send -1
                changed[setting] = max(body.number(name, type_default), 0)
            else:
                changed[setting] = body.number(name, type_default, *bounds)
    if body.has("samplers"):
        named = ";".join(body.get_texts("samplers", 32))
        if len(named) > MAX_SAMPLERS_CHARS:
            raise InputError(f"samplers has more than {MAX_SAMPLERS_CHARS:,} characters")
        changed["samplers"] = named
    if body.has("dry_sequence_breakers"):
        changed["dry_sequence_breaker"] = body.get_texts("dry_sequence_breakers", 64) or ("none",)
    if body.has("logit_bias"):
        biases = parse_biases(body.get("logit_bias"), tokenizer)
        changed["logit_bias"] = (*defaults.logit_bias, *biases)
    sampling = dataclasses.replace(defaults, **changed)
    sampling.check_sampling(tokenizer.vocab_size)
    return sampling


def parse_biases(logit_bias: Any, tokenizer: Tokenizer) -> list[str]:
    """Convert `{"id": bias}` or `[[id or text, bias]]`, where false forbids a token, to texts such as 15043+1."""
    bias_pairs = [*logit_bias.items()] if isinstance(logit_bias, dict) else logit_bias
    if not isinstance(bias_pairs, list) or len(bias_pairs) > MAX_BIASES:
        raise InputError(f"logit_bias must be an object or a list of at most {MAX_BIASES:,} pairs")
    biases = list[str]()
    for bias_pair in bias_pairs:
        if not isinstance(bias_pair, list | tuple) or len(bias_pair) != 2:
            raise InputError("logit_bias: each value must be a pair of a token and a number")
        token, bias = bias_pair
        bias = -math.inf if bias is False else bias
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not bias < MAX_NUMBER:
            raise InputError("logit_bias: a bias must be a number, or false")
        biases += [f"{id}{float(bias):+}" for id in parse_token_ids(token, tokenizer)]
        if len(biases) > MAX_BIASES:
            raise InputError(f"logit_bias has more than {MAX_BIASES:,} tokens")
    return biases


def parse_token_ids(token: Any, tokenizer: Tokenizer) -> list[int]:
    """Return the id of a token of logit_bias, given as a number or digits, or the ids of a text. Raises InputError."""
    if isinstance(token, str) and token.isdecimal() and len(token) < 10:
        token = int(token)
    if isinstance(token, str):
        return tokenizer.encode(token[:1000], bos=False, eos=False, special=False)
    if isinstance(token, bool) or not isinstance(token, int):
        raise InputError("logit_bias: a token must be an id or a text")
    if not 0 <= token < tokenizer.vocab_size:
        fact = f"logit_bias: there is no token {token}; the vocabulary has {tokenizer.vocab_size:,}"
        raise InputError(fact)
    return [token]


def parse_prompts(
    value: Any, tokenizer: Tokenizer, max_prompts: int, name: str = "prompt"
) -> list[list[int]]:
    """Tokenize the prompts of the field `name`: each is a text, or a list of ids and texts. Raises InputError."""
    if value is None:
        raise InputError(f"'{name}' is required")
    prompt_parts = value if isinstance(value, list) else []
    is_nested = any(isinstance(prompt_part, list | dict) for prompt_part in prompt_parts)
    is_text_list = len(prompt_parts) > 1 and all(isinstance(part, str) for part in prompt_parts)
    prompts = prompt_parts if is_nested or is_text_list else [value]
    if len(prompts) > max_prompts:
        raise InputError(f"{name} has {len(prompts)} texts; at most {max_prompts}")
    return [parse_prompt(prompt, tokenizer, name) for prompt in prompts]


def parse_prompt(
    prompt: Any, tokenizer: Tokenizer, name: str = "prompt", bos: bool | None = None, special: bool = True
) -> list[int]:  # fmt: skip
    """Tokenize a text, a list of ids and texts, {"prompt_string": text} or {"content": [parts]}; `bos`: whether BOS
    comes first (None: as the vocabulary says); `special`: texts may spell special tokens. Raises InputError."""
    if isinstance(prompt, dict) and isinstance(prompt.get("prompt_string"), str):
        if prompt.get("multimodal_data"):
            raise InputError("multimodal_data: this model reads text only")
        prompt = prompt["prompt_string"]
    elif isinstance(prompt, dict) and isinstance(prompt.get("content"), list):
        prompt = "".join(part_text(part, name) for part in prompt["content"])
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, bos=bos, eos=False, special=special)
        if ids[:2] != [tokenizer.bos] * 2:
            return ids
        # the text spells BOS, perhaps with the space that decoders put behind it
        text = prompt.partition(tokenizer.piece(ids[0]).decode(errors="replace"))[2]
        return tokenizer.encode(text.removeprefix(" " * tokenizer.add_space_prefix), eos=False)
    if not isinstance(prompt, list) or not prompt:
        raise InputError(f"{name} must be a text, or a list of token ids and texts")
    ids = list[int]()
    for part_index, prompt_part in enumerate(prompt):
        if isinstance(prompt_part, str):
            part_bos = bos if part_index == 0 else False
            ids += tokenizer.encode(prompt_part, bos=part_bos, eos=False, special=special)
        elif type(prompt_part) is int and 0 <= prompt_part < tokenizer.vocab_size:  # no bool
            ids.append(prompt_part)
        else:
            fact = f"must be a text or a token id below {tokenizer.vocab_size:,}"
            raise InputError(f"{name}[{part_index}] {fact}")
    return ids


def part_text(fields: Any, name: str) -> str:
    """Return the text of a part of content, {"type": "text", "text": "…"}. Raises InputError."""
    part = JsonBody(fields, f"{name}.content")
    if part.text("type") != "text":
        raise InputError(part.fact("type", f"is {part.text('type')!r}; this model reads text"))
    return part.text("text")


def adapters_of(adapter_entries: Any, defaults: Sequence[float]) -> tuple[float, ...]:
    """Parse [{"id": 0, "scale": 0.5}] to all adapters' scales, 0 if not listed; None: `defaults`. Raises InputError."""
    if adapter_entries is None:
        return tuple(defaults)
    if not isinstance(adapter_entries, list):
        raise InputError('lora must be a list like [{"id": 0, "scale": 1.0}]')
    adapter_scales = [0.0] * len(defaults)
    for adapter_entry in adapter_entries:
        body = JsonBody(adapter_entry, "lora")
        id = body.number("id", -1)
        if not 0 <= id < len(adapter_scales):
            raise InputError(f"lora: there is no adapter {id}; there are {len(adapter_scales)}")
        adapter_scales[id] = body.number("scale", 0.0, -1e6, 1e6)
    return tuple(adapter_scales)


def _format_number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
