"""/infill: prompts of text between a prefix and a suffix, from tokens that the vocabulary has for it.

[fim_rep]myproject [fim_sep]FILE, a chunk … [fim_sep]filename [fim_pre]PREFIX PROMPT [fim_suf]SUFFIX [fim_mid]"""

from functools import partial

from packtrain.common.errors import InputError
from packtrain.data.tokenizer import Tokenizer
from packtrain.serving.json_fields import JsonBody, parse_prompt
from packtrain.serving.response_shapes import HttpRefusal
from packtrain.serving.server_state import Server

FILL_TOKENS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
MAX_FILL_TOKENS = 2048  # tokens of prefix, prompt and suffix, as many as a batch of llama-server
MAX_CHUNKS, ANSWER_TOKENS = 1024, 128
CHUNK_START = "\n\n--- snippet ---\n\n"  # before a chunk, where no token says that a file begins


def fill_prompt(server: Server, body: JsonBody) -> list[int]:
    """Return the tokens of a request's prompt: the end of its chunks and prefix, and the beginning of its suffix. Of
    MAX_FILL_TOKENS, or 3/4 of the context if less, the prefix takes at most 3/4. Raises HttpRefusal, InputError."""
    tokenizer = server.tokenizer
    if missing := missing_tokens(tokenizer):
        raise HttpRefusal(501, f"Infill is not supported by this model: {missing}")
    texts = {name: _text_ids(server, body, name) for name in ("input_prefix", "input_suffix")}
    prompt_ids = tokenizer.encode(body.text("prompt"), bos=False, eos=False)
    extra_ids = _chunk_ids(server, body)
    context_size = server.engine.max_seq_tokens
    answer_size = max(server.limits.max_answer_tokens, ANSWER_TOKENS)
    size = min(MAX_FILL_TOKENS, 3 * context_size // 4)
    prefix_size, suffix_size = 3 * (size // 4), max(size // 4 - 2 - len(prompt_ids), 0)
    extra_size = max(context_size - size - 2 * answer_size, 0)
    bos = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    prefix = [*bos, *texts["input_prefix"][-prefix_size:], *prompt_ids]
    filled = middle_prompt(tokenizer, prefix, texts["input_suffix"][:suffix_size])
    return [*extra_ids[max(len(extra_ids) - extra_size, 0) :], *filled]


def missing_tokens(tokenizer: Tokenizer) -> str:
    """Return a clause for messages about the fill-in-the-middle tokens that the vocabulary lacks; "" if it has all."""
    missing = [f"{w} ({name})" for name, w in FILL_TOKENS.items() if name not in tokenizer.fill_ids]
    return f"its vocabulary has no token for {', '.join(missing)}" if missing else ""


def middle_prompt(tokenizer: Tokenizer, prefix: list[int], suffix: list[int]) -> list[int]:
    """Return the tokens that ask for the text between `prefix`, which may begin with BOS, and `suffix`."""
    ids, num_bos = tokenizer.fill_ids, int(prefix[:1] == [tokenizer.bos])
    head = [*prefix[:num_bos], ids["fim_pre"], *prefix[num_bos:]]
    return [*head, ids["fim_suf"], *suffix, ids["fim_mid"]]


def _text_ids(server: Server, body: JsonBody, name: str) -> list[int]:
    """Tokenize a required field, text or a list of ids and texts that spell no control tokens. Raises InputError."""
    if not body.has(name):
        raise InputError(f"'{name}' is required; it may be empty")
    return parse_prompt(body.get(name), server.tokenizer, name, bos=False, special=False)


def _chunk_ids(server: Server, body: JsonBody) -> list[int]:
    """Return the tokens of the texts in `input_extra`, which are pieces of other files, each with its file's name."""
    encode = partial(server.tokenizer.encode, bos=False, eos=False, special=False)
    fill_ids, file_id = server.tokenizer.fill_ids, server.tokenizer.fill_ids.get("fim_sep")
    ids = [fill_ids["fim_rep"], *encode("myproject\n")] if "fim_rep" in fill_ids else []
    for number, fields in enumerate(body.get_list("input_extra", MAX_CHUNKS)):
        chunk = JsonBody(fields, f"input_extra[{number}]")
        if not chunk.has("text"):
            raise InputError(f"{chunk.path('text')} is required")
        file_name = chunk.text("filename", "tmp")
        ids += encode(CHUNK_START) if file_id is None else [file_id, *encode(f"{file_name}\n")]
        ids += encode(chunk.text("text"))
    return ids if file_id is None else [*ids, file_id, *encode("filename\n")]
