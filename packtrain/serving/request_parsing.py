"""Parsing requests into jobs: prompts, settings and grammars. Runs in threads of its own, since texts may be long."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from packtrain.common.errors import InputError
from packtrain.data.conversations.messages import RECORD_ADVICE, Conversation, Message, question
from packtrain.data.tokenizer import Tokenizer
from packtrain.inference.grammar import Grammar
from packtrain.serving import fill_in_middle, json_fields
from packtrain.serving.generation_jobs import GenerationJob
from packtrain.serving.json_fields import MAX_ANSWERS, MAX_GRAMMAR_CHARS, MOST_TOP, JsonBody
from packtrain.serving.reasoning_text import FORMATS, MARKS, NONE, is_thinking
from packtrain.serving.server_state import Server
from packtrain.serving.tool_calls import RequestTools, with_tools_prompt

BIAS_NBYTES, ID_NBYTES = 72, 36  # bytes of a bias and of an id in a waiting job
MOST_TOLD = 1 << 15  # most probabilities in all answers of a request


def parse_job(
    server: Server, body: JsonBody, prompt_ids: list[int], grammar: Grammar | None
) -> GenerationJob:
    """Return the job of an answer to `prompt_ids`; with_top adds logprobs. Raises InputError, ServerBusy."""
    body.refuse_unmet("any")
    count = -1
    for field_name in ("n_predict", "max_tokens", "max_completion_tokens"):
        count = body.number(field_name, count, -1, 1 << 30)
    seed = body.number("seed", server.seed, -json_fields.MAX_SEED, json_fields.MAX_SEED)
    ignore_eos = body.get_flag("ignore_eos")
    sampling = json_fields.parse_sampling(body, server.sampling, server.tokenizer)
    if ignore_eos:
        eos_biases = (f"{id}-inf" for id in sorted(server.tokenizer.eog_ids))
        sampling = replace(sampling, logit_bias=(*sampling.logit_bias, *eos_biases))
    stop_texts = (*filter(None, body.get_texts("stop", json_fields.MAX_STOP_TEXTS)),)
    kept_texts = *sampling.dry_sequence_breaker, *stop_texts
    ids = min(len(prompt_ids), server.engine.max_seq_tokens)  # longer ones are refused
    size = BIAS_NBYTES * len(sampling.logit_bias) + ID_NBYTES * ids + 4 * sum(map(len, kept_texts))
    return GenerationJob(
        prompt=tuple(prompt_ids), sampling=server.keep(sampling, size, "settings"),
        seed=secrets.randbits(32) if seed == -1 else abs(seed),
        max_tokens=count if count >= 0 else server.limits.max_answer_tokens, stops=stop_texts, grammar=grammar,
        slot=body.number("id_slot", -1, -1, 1 << 30), use_cache=body.get_flag("cache_prompt", True),
        adapter_scales=json_fields.adapters_of(body.get("lora"), server.scales), ignore_eos=ignore_eos,
        report_progress=body.get_flag("return_progress") and body.get_flag("stream"),
        max_seconds=body.number("t_max_predict_ms", 0.0) / 1e3, min_indent=body.number("n_indent", 0, 0, 1 << 20),
        num_keep=body.number("n_keep", 0, -1, 1 << 30), num_discard=body.number("n_discard", 0, 0, 1 << 30),
    )  # fmt: skip


def with_top(server: Server, job: GenerationJob, shown: int | None, answers: int) -> GenerationJob:
    """Return the job with the `shown` likeliest tokens at each token (None: none). An unlimited job gets a `max_tokens`
    that keeps those of `answers` jobs within MOST_TOLD; InputError if a job's own limit does not."""
    if shown is None:
        return job
    top = max(shown, 1)
    num_prompt_tokens = len(job.prompt) if job.scores_prompt else 0
    num_tokens = min(job.max_tokens, server.engine.max_seq_tokens)
    max_tokens = MOST_TOLD // (top * answers) - num_prompt_tokens
    if max(num_tokens, 1) > max_tokens:
        fact = f"{top} probabilities of each token are more than {MOST_TOLD:,} in all"
        raise InputError(f"{fact}; ask for fewer, or for fewer tokens")
    max_tokens = max_tokens if job.max_tokens < 0 else job.max_tokens
    return replace(job, num_top_logprobs=top, max_tokens=max_tokens)


def seeded_jobs(job: GenerationJob, count: int) -> list[GenerationJob]:
    """Return `count` jobs like `job`, with consecutive seeds from its own on; several may take any slot."""
    if count == 1:
        return [job]
    return [replace(job, seed=job.seed + n, slot=-1) for n in range(count)]


def parse_grammar(server: Server, body: JsonBody) -> Grammar | None:
    """Create a request's grammar (grammar, json_schema, response_format), or None. Raises InputError, ServerBusy."""
    grammar_text, schema_text = body.text("grammar", "", MAX_GRAMMAR_CHARS), schema_of(body)
    if grammar_text and schema_text:
        raise InputError("grammar and json_schema exclude each other")
    if schema_text:
        return server.keep(Grammar.from_schema(server.tokenizer, schema_text), len(schema_text))
    if not grammar_text:
        return None
    return server.keep(Grammar.from_gbnf(server.tokenizer, grammar_text), len(grammar_text))


def schema_of(body: JsonBody) -> str:
    """Return the JSON schema that a request asks for, as text; "" without one. Raises InputError."""
    schema, response_format = body.get("json_schema"), body.get("response_format")
    if response_format is not None:
        format_schema = parse_response_format(JsonBody(response_format, "response_format"))
        if format_schema is not None and schema is not None:
            raise InputError("json_schema and response_format exclude each other")
        schema = schema if format_schema is None else format_schema
    schema_json = "" if schema is None else json.dumps(schema)
    if len(schema_json) > MAX_GRAMMAR_CHARS:
        raise InputError(f"json_schema has more than {MAX_GRAMMAR_CHARS:,} characters")
    return schema_json


def parse_response_format(response_format: JsonBody) -> Any:
    """Return the schema of a response_format; None for text. Raises InputError."""
    format_type = response_format.text("type")
    if format_type == "text":
        return None
    if format_type == "json_object":
        if response_format.has("json_schema"):
            raise InputError("response_format: json_schema is for the type json_schema")
        return response_format.get("schema") or {"type": "object"}
    if format_type == "json_schema":
        if not response_format.has("schema"):
            response_format = JsonBody(
                response_format.get("json_schema"), "response_format.json_schema"
            )
        elif response_format.has("json_schema"):
            raise InputError("response_format: schema and json_schema exclude each other")
        if response_format.get("schema") is None:
            raise InputError("response_format: json_schema has no schema; it must have one")
        schema = response_format.get("schema")
        return {"type": "object"} if schema == {} else schema
    fact = f"response_format.type is {format_type!r}; it must be text, json_object or json_schema"
    raise InputError(fact)


# ---- each kind of request


def parse_llama_completion(server: Server, body: JsonBody) -> list[GenerationJob]:
    """Parse a request of /completion into jobs, one for each prompt. Raises InputError, ServerBusy."""
    body.refuse_unmet("llama")
    prompts = json_fields.parse_prompts(body.get("prompt"), server.tokenizer, MAX_ANSWERS)
    grammar = parse_grammar(server, body)
    num_top = body.number("n_probs", 0, 0, server.tokenizer.vocab_size)
    prompt_jobs = [parse_job(server, body, prompt, grammar) for prompt in prompts]
    is_post_sampling = body.get_flag("post_sampling_probs")
    prompt_jobs = [replace(job, is_post_sampling=is_post_sampling) for job in prompt_jobs]
    jobs = [with_top(server, job, num_top or None, len(prompt_jobs)) for job in prompt_jobs]
    return jobs if len(jobs) == 1 else [replace(job, slot=-1) for job in jobs]


@dataclass(frozen=True, slots=True)
class OpenAIRequest:
    """A parsed request of OpenAI's API.

    count            number of answers to each prompt
    shown            likeliest tokens returned with each token; None: not even its own probability
    echoed_texts     text with which each answer begins
    tools            tools that answers may call
    starts_thinking  whether answers begin within thoughts; None: thoughts are not separated
    think_marks      texts before and behind thoughts
    words_prefix     text that may stand before an answer's words, see ToolCallStyle
    has_usage        whether a stream ends with the counts of tokens
    has_timings      whether each event of a stream has the counts so far
    """

    jobs: list[GenerationJob]
    count: int
    shown: int | None
    echoed_texts: tuple[str, ...] = ()
    tools: RequestTools | None = None
    starts_thinking: bool | None = None
    think_marks: tuple[str, str] = MARKS
    words_prefix: str = ""
    has_usage: bool = False
    has_timings: bool = False

    @property
    def warnings(self) -> tuple[str, ...]:
        """Messages for the client: keywords of tools' schemas that the grammar does not enforce."""
        return self.tools.warnings if self.tools else ()


def parse_stream_counts(body: JsonBody) -> dict[str, Any]:
    """Return the fields of OpenAIRequest that say which token counts a stream reports. Raises InputError."""
    name = "stream_options"
    has_usage = body.has(name) and JsonBody(body.get(name), name).get_flag("include_usage")
    return {"has_usage": has_usage, "has_timings": body.get_flag("timings_per_token")}


def parse_text_completion(server: Server, body: JsonBody) -> OpenAIRequest:
    """Parse a request of /v1/completions: `n` jobs for each prompt. Raises InputError, ServerBusy."""
    body.refuse_unmet("text")
    prompts = json_fields.parse_prompts(body.get("prompt"), server.tokenizer, MAX_ANSWERS)
    grammar = parse_grammar(server, body)
    logprobs = body.get("logprobs")
    has_logprobs = bool(logprobs) if isinstance(logprobs, bool) else body.has("logprobs")
    top = 1 if logprobs is True else body.number("logprobs", 0, 0, MOST_TOP) if has_logprobs else 0
    num_logprobs = parse_num_logprobs(body, has_logprobs, top)
    count = body.number("n", 1, 1, MAX_ANSWERS)
    if len(prompts) * count > MAX_ANSWERS:
        raise InputError(f"n: {len(prompts) * count} answers are asked for; at most {MAX_ANSWERS}")
    if suffix := body.text("suffix"):
        prompts = suffix_prompts(server.tokenizer, prompts, suffix, body.get_flag("echo"))
    if body.number("best_of", 1, 1) > count:
        raise InputError("best_of is not supported: ask for n answers, and choose")
    prompt_jobs = [parse_job(server, body, prompt, grammar) for prompt in prompts]
    if body.get_flag("echo") and has_logprobs:
        prompt_jobs = [replace(job, scores_prompt=True, use_cache=False) for job in prompt_jobs]
    total_answers = count * len(prompt_jobs)
    jobs = [
        job
        for prompt_job in prompt_jobs
        for job in seeded_jobs(with_top(server, prompt_job, num_logprobs, total_answers), count)
    ]
    echoes = (server.tokenizer.decode(job.prompt) for job in jobs)
    echoed_texts = tuple(echoes) if body.get_flag("echo") else ()
    return OpenAIRequest(jobs, count, num_logprobs, echoed_texts, **parse_stream_counts(body))


def suffix_prompts(
    tokenizer: Tokenizer, prompts: Sequence[list[int]], suffix: str, is_echoed: bool
) -> list[list[int]]:
    """Return for each of `prompts` the tokens that ask for the text between it and `suffix`. Raises InputError if the
    vocabulary has no tokens for that, or if `is_echoed`: the request wants the prompt echoed, too."""
    if missing := fill_in_middle.missing_tokens(tokenizer):
        raise InputError(f"suffix is not supported by this model: {missing}")
    if is_echoed:
        raise InputError("suffix and echo exclude each other: the answer stands between two texts")
    suffix_ids = tokenizer.encode(suffix, bos=False, eos=False, special=False)
    return [fill_in_middle.middle_prompt(tokenizer, prompt, suffix_ids) for prompt in prompts]


def parse_num_logprobs(body: JsonBody, has_logprobs: bool, num_top: int) -> int | None:
    """Return how many likely tokens to return with each token: the larger of `num_top`, OpenAI's field, and the field
    `n_probs`; None if neither logprobs (`has_logprobs`) nor `n_probs` are requested. Raises InputError."""
    n_probs = body.number("n_probs", 0, 0, MOST_TOP)
    return max(num_top, n_probs) if has_logprobs or n_probs else None


def parse_chat_completion(server: Server, body: JsonBody) -> OpenAIRequest:
    """Parse a request of /v1/chat/completions: `n` jobs for one conversation. Raises InputError, ServerBusy."""
    conversation = parse_conversation(body)
    tools = RequestTools.from_request(body, conversation, server.style)
    text = prompt_text(server, body, conversation, tools)
    num_top, has_logprobs = body.number("top_logprobs", 0, 0, MOST_TOP), body.get_flag("logprobs")
    if num_top and not has_logprobs:
        raise InputError("top_logprobs requires logprobs to be true")
    num_logprobs = parse_num_logprobs(body, has_logprobs, num_top)
    if tools and body.text("grammar"):
        raise InputError("tools and grammar exclude each other")
    grammar = (
        server.keep(tools.grammar(server.tokenizer, schema_of(body)), len(repr(tools.functions)))
        if tools
        else parse_grammar(server, body)
    )
    job = parse_job(server, body, server.encode_prompt(text), grammar)
    has_special_tokens = tools is not None and tools.has_tokens(server.tokenizer)
    num_answers = body.number("n", 1, 1, MAX_ANSWERS)
    job = with_top(server, job, num_logprobs, num_answers)
    job = replace(job, has_special_tokens=has_special_tokens)
    thinks, marks = thinks_of(server, body, text, conversation), server.think_marks or MARKS
    return OpenAIRequest(
        seeded_jobs(job, num_answers), num_answers, num_logprobs, tools=tools, starts_thinking=thinks,
        think_marks=marks, words_prefix=server.style.words_prefix, **parse_stream_counts(body),
    )  # fmt: skip


def thinks_of(server: Server, body: JsonBody, text: str, conversation: Conversation) -> bool | None:
    """Return whether answers to the prompt `text` begin within thoughts; None: not separated. Raises InputError."""
    reasoning_format = body.text("reasoning_format", server.reasoning_format)
    if reasoning_format not in FORMATS:
        fact = f"reasoning_format is {reasoning_format!r}; it must be one of {', '.join(FORMATS)}"
        raise InputError(fact)
    if reasoning_format == NONE or server.think_marks is None:
        return None
    last_message = conversation.messages[-1]
    prefix = last_message["content"] if last_message["role"] == "assistant" else None
    return is_thinking(text, prefix, server.think_marks)


def parse_conversation(body: JsonBody) -> Conversation:
    """Parse the messages and tools of a chat. Raises InputError."""
    if not isinstance(body.get("messages"), list) or not body.get("messages"):
        raise InputError("'messages' is required; it must be a list of at least one message")
    body.refuse_unmet("chat")
    try:
        *turns, last_turn = map(with_line_breaks, body.get("messages"))
        if isinstance(last_turn, dict) and last_turn.get("role") == "assistant":  # it is continued
            last_turn = with_line_breaks(body.get("messages")[-1], "\n\n")
        turns.append(last_turn)
        conversation = question(turns, body.get("tools"), "request")
    except InputError as error:  # its advice is about files
        advice = "" if error.advice == RECORD_ADVICE else error.advice
        raise InputError(error.fact.removeprefix("request: "), advice) from None
    roles = ("system" if m["role"] == "developer" else m["role"] for m in conversation.messages)
    messages = [{**m, "role": role} for m, role in zip(conversation.messages, roles, strict=True)]
    if [m["role"] for m in messages[-2:]] == ["assistant", "assistant"]:
        raise InputError("messages: two of the assistant's stand at the end; one can be continued")
    return replace(conversation, messages=messages)


def with_line_breaks(message: Any, separator: str = "\n") -> Any:
    """Return a message with the separator between its parts of text, as llama.cpp joins them."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list):
        return message
    is_text = [isinstance(x, dict) and isinstance(x.get("text"), str) for x in parts[:-1]] + [False]
    pairs = zip(parts, is_text, strict=True) if parts else ()
    lines = [x | {"text": f"{x['text']}{separator}"} if joins else x for x, joins in pairs]
    return message | {"content": lines}


def template_variables(body: JsonBody) -> dict[str, Any]:
    """Return variables for the chat template: chat_template_kwargs and reasoning_effort. Raises InputError."""
    variables, effort = {**body.get_object("chat_template_kwargs")}, body.text("reasoning_effort")
    JsonBody(variables, "chat_template_kwargs").get_flag("enable_thinking")
    if effort == "none":
        variables.pop("reasoning_effort", None)
        return variables | {"enable_thinking": False}
    return variables | (
        dict.fromkeys(("reasoning_effort", "reasoning_strength"), effort) if effort else {}
    )


def prompt_text(
    server: Server, body: JsonBody, conversation: Conversation, tools: RequestTools | None = None
) -> str:
    """Render the prompt of a conversation; an assistant's message at its end is continued. Raises InputError."""
    messages = conversation.messages
    partial_answer: Message | None = messages[-1] if messages[-1]["role"] == "assistant" else None
    prompt = replace(conversation, messages=messages[:-1] if partial_answer else messages)
    if not prompt.messages:
        raise InputError("messages: there is nothing to answer before the assistant's message")
    if partial_answer and partial_answer.get("tool_calls"):
        raise InputError("messages: the last calls tools; their results must follow")
    if tools is None:
        prompt = replace(prompt, tools=None)
    elif not server.renderer.takes_tools:
        prompt = with_tools_prompt(prompt, server.style)
    has_partial_answer = partial_answer is not None
    has_start = body.get_flag("add_generation_prompt", True)
    if body.get_flag("continue_final_message"):
        if body.has("add_generation_prompt") and has_start:
            raise InputError("add_generation_prompt and continue_final_message exclude each other")
        if not has_partial_answer:
            raise InputError("continue_final_message: the last message is not the assistant's")
    has_start = has_start or has_partial_answer
    rendered_text = server.render_prompt(prompt, template_variables(body), has_start)
    return rendered_text + (partial_answer["content"] if partial_answer else "")
