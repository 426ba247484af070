"""llama.cpp's samplers, for benchmarks.peer: tokens drawn by chains that are built as its own programs build them.

Settings have llama.cpp's names, as in packtrain.inference.sampling.sampling_settings; `samplers` is the order.
"""

import ctypes
from collections import Counter
from collections.abc import Iterator
from typing import Any

import llama_cpp as cpp

Settings = dict


def drawn(question: dict) -> list[dict[int, int]]:
    """How often each token comes last, in `draws` texts after `recent`, for each of `chains`."""
    vocab, items = vocabulary(question["model"]), items_of(question["logits"])
    return [Counter(tokens(vocab, items, question, settings)) for settings in question["chains"]]


def greedy(question: dict) -> list[int]:
    """The token of each of `rows`."""
    vocab, rows = vocabulary(question["model"]), question["rows"]
    chain = chain_of(vocab, len(rows[0]), question["greedy"], 0)
    for token in question["recent"]:
        cpp.llama_sampler_accept(chain, token)
    return [apply(chain, items_of(row)) for row in rows]


def vocabulary(path: str) -> Any:
    """That of a model, which lives on with it."""
    model = cpp.llama_model_default_params()
    model.vocab_only = True
    return cpp.llama_model_get_vocab(cpp.llama_model_load_from_file(path.encode(), model))


def items_of(logits: list[float]) -> Any:
    every = (cpp.llama_token_data(id, logit, 0.0) for id, logit in enumerate(logits))
    return (cpp.llama_token_data * len(logits))(*every)


def tokens(vocab: Any, items: Any, question: dict, settings: Settings) -> Iterator[int]:
    """The last token of each text. One chain draws all texts of one token; longer ones have their own."""
    steps, chain = settings["steps"], None
    for seed in range(settings["seed"], settings["seed"] + question["draws"]):
        if chain is None or steps > 1:
            cpp.llama_sampler_free(chain) if chain else None
            chain = chain_of(vocab, len(items), settings, seed)
            for token in question["recent"]:
                cpp.llama_sampler_accept(chain, token)
        for _ in range(steps):
            token = apply(chain, items)
            if steps > 1:
                cpp.llama_sampler_accept(chain, token)
        yield token


def apply(chain: Any, items: Any) -> int:
    token_array = type(items).from_buffer_copy(items)
    data = cpp.llama_token_data_array(token_array, len(token_array), -1, False)
    cpp.llama_sampler_apply(chain, ctypes.byref(data))
    return data.data[data.selected].id


def chain_of(vocab: Any, size: int, s: Settings, seed: int) -> Any:
    """As common_sampler_init in common/sampling.cpp."""
    biases = (cpp.llama_logit_bias * len(s["biases"]))(
        *(cpp.llama_logit_bias(id, bias) for id, bias in s["biases"])
    )
    breakers = (ctypes.c_char_p * len(s["breakers"]))(*(b.encode() for b in s["breakers"]))
    dry = s["dry_multiplier"], s["dry_base"], s["dry_allowed_length"], s["dry_penalty_last_n"]
    penalties = s["repeat_penalty"], s["frequency_penalty"], s["presence_penalty"]
    constructors = {
        "penalties": lambda: cpp.llama_sampler_init_penalties(size, s["repeat_last_n"], *penalties),
        "dry": lambda: cpp.llama_sampler_init_dry(vocab, *dry, breakers, len(breakers)),
        "top_n_sigma": lambda: cpp.llama_sampler_init_top_n_sigma(s["top_n_sigma"]),
        "top_k": lambda: cpp.llama_sampler_init_top_k(s["top_k"]),
        "typ_p": lambda: cpp.llama_sampler_init_typical(s["typical"], 0),
        "top_p": lambda: cpp.llama_sampler_init_top_p(s["top_p"], 0),
        "min_p": lambda: cpp.llama_sampler_init_min_p(s["min_p"], 0),
        "xtc": lambda: cpp.llama_sampler_init_xtc(
            s["xtc_probability"], s["xtc_threshold"], 0, seed
        ),
        "temperature": lambda: cpp.llama_sampler_init_temp_ext(
            s["temp"], s["dynatemp_range"], s["dynatemp_exp"]
        ),
    }
    middle = [constructors[name]() for name in s["samplers"]]
    last = [cpp.llama_sampler_init_dist(seed)]
    target, rate = s["mirostat_ent"], s["mirostat_lr"]
    if s["mirostat"]:
        middle = [cpp.llama_sampler_init_temp(s["temp"])]
    if s["mirostat"] == 1:
        last = [cpp.llama_sampler_init_mirostat(size, seed, target, rate, 100)]
    if s["mirostat"] == 2:
        last = [cpp.llama_sampler_init_mirostat_v2(seed, target, rate)]
    bias_samplers = [cpp.llama_sampler_init_logit_bias(size, len(biases), biases)] if biases else []
    chain = cpp.llama_sampler_chain_init(cpp.llama_sampler_chain_default_params())
    for sampler in (*bias_samplers, *middle, *last):
        cpp.llama_sampler_chain_add(chain, sampler)
    return chain
