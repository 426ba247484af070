"""Requests become jobs: prompts, settings and grammars. Runs in threads of its own, since texts may be long."""

import json
from dataclasses import dataclass, replace
from typing import Any

from packtrain.common.errors import InputError
from packtrain.data.conversations.messages import WANTED, Conversation, Message, question
from packtrain.inference.grammar import Grammar
from packtrain.serving import json_fields as serving_asked
from packtrain.serving.generation_jobs import Job
from packtrain.serving.json_fields import LONGEST_GRAMMAR, MOST_ANSWERS, MOST_TOP, Body, prompts_of
from packtrain.serving.reasoning_text import FORMATS, MARKS, NONE, is_thinking
from packtrain.serving.server_state import Server
from packtrain.serving.tool_calls import Tools, explained

BIAS_NBYTES, ID_NBYTES = 72, 36  # of one in a job that waits
MOST_TOLD = 1 << 15  # probabilities of all answers of a request


def job_of(server: Server, body: Body, prompt: list[int], grammar: Grammar | None) -> Job:
    """What an answer needs, but for probabilities. Raises InputError."""
    count = -1
    for name in ("n_predict", "max_tokens", "max_completion_tokens"):
        count = body.number(name, count, -1, 1 << 30)
    max_tokens = server.limits.answer
    endless = body.flag("ignore_eos")
    sampling = serving_asked.sampling_of(body, server.sampling, server.tokenizer)
    if endless:
        eos_biases = (f"{id}-inf" for id in sorted(server.tokenizer.ends))
        sampling = replace(sampling, logit_bias=(*sampling.logit_bias, *eos_biases))
    stops = serving_asked.stops_of(body)
    texts = *sampling.dry_sequence_breaker, *stops
    ids = min(len(prompt), server.engine.limit)  # longer ones are refused
    size = BIAS_NBYTES * len(sampling.logit_bias) + ID_NBYTES * ids + 4 * sum(map(len, texts))
    return Job(
        prompt=tuple(prompt),
        sampling=server.keep(sampling, size, "settings"),
        seed=serving_asked.seed_of(body, server.seed),
        count=count if max_tokens < 0 else max_tokens if count < 0 else min(count, max_tokens),
        stops=stops,
        grammar=grammar,
        slot=body.number("id_slot", -1, -1, 1 << 30),
        reuse=body.flag("cache_prompt", True),
        adapters=serving_asked.adapters_of(body.get("lora"), server.scales),
        endless=endless,
        progress=body.flag("return_progress") and body.flag("stream"),
        seconds=body.number("t_max_predict_ms", 0.0) / 1e3,
        indent=body.number("n_indent", 0, 0, 1 << 20),
        keep=body.number("n_keep", 0, -1, 1 << 30),
        discard=body.number("n_discard", 0, 0, 1 << 30),
    )


def with_top(server: Server, job: Job, shown: int | None, answers: int) -> Job:
    """The job with so many probabilities for each token: as many tokens as can be told, if the request does not say.

    Raises InputError if these are too many to keep.
    """
    if shown is None:
        return job
    top = max(shown, 1)
    num_tokens, room = min(job.count, server.engine.limit), MOST_TOLD // (top * answers)
    if max(num_tokens, 1) > room:
        raise InputError(
            f"{top} probabilities of each token are more than {MOST_TOLD:,} in all; ask for fewer, or for fewer tokens"
        )
    return replace(job, top=top, count=room if job.count < 0 else job.count)


def several(job: Job, count: int) -> list[Job]:
    """Answers to the same prompt, each with the seed after that of the one before; any slot may take them."""
    if count == 1:
        return [job]
    return [replace(job, seed=job.seed + n, slot=-1) for n in range(count)]


def grammar_of(server: Server, body: Body) -> Grammar | None:
    """The grammar that a request asks for in any of the ways there are. Raises InputError."""
    text, schema = body.text("grammar", "", LONGEST_GRAMMAR), schema_of(body)
    if text and schema:
        raise InputError("grammar and json_schema exclude each other")
    if schema:
        return server.keep(Grammar.from_schema(server.tokenizer, schema), len(schema))
    if not text:
        return None
    return server.keep(Grammar.from_gbnf(server.tokenizer, text), len(text))


def schema_of(body: Body) -> str:
    """The schema that a request asks for, as JSON; "" without one. Raises InputError."""
    schema, response_format = body.get("json_schema"), body.get("response_format")
    if response_format is not None:
        format_schema = format_of(Body(response_format, "response_format"))
        if format_schema is not None and schema is not None:
            raise InputError("json_schema and response_format exclude each other")
        schema = schema if format_schema is None else format_schema
    schema_json = "" if schema is None else json.dumps(schema)
    if len(schema_json) > LONGEST_GRAMMAR:
        raise InputError(f"json_schema has more than {LONGEST_GRAMMAR:,} characters")
    return schema_json


def format_of(response_format: Body) -> Any:
    """The schema of a response_format, if it has one. Raises InputError."""
    kind = response_format.text("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = response_format.get("schema")
        return schema or {"type": "object"}
    if kind == "json_schema":
        if not response_format.has("schema"):
            response_format = Body(
                response_format.get("json_schema"), "response_format.json_schema"
            )
        elif response_format.has("json_schema"):
            raise InputError("response_format: schema and json_schema exclude each other")
        if response_format.get("schema") is None:
            raise InputError("response_format: json_schema has no schema; it must have one")
        return response_format.get("schema") or {"type": "object"}
    raise InputError(
        f"response_format.type is {kind!r}; it must be text, json_object or json_schema"
    )


# ---- each kind of request


def completions(server: Server, body: Body) -> list[Job]:
    """Jobs of /completion. Raises InputError."""
    prompts = prompts_of(body.get("prompt"), server.tokenizer, MOST_ANSWERS)
    grammar = grammar_of(server, body)
    top = body.number("n_probs", 0, 0, server.tokenizer.vocab_size)
    prompt_jobs = [job_of(server, body, prompt, grammar) for prompt in prompts]
    prompt_jobs = [replace(job, after=body.flag("post_sampling_probs")) for job in prompt_jobs]
    jobs = [with_top(server, job, top or None, len(prompt_jobs)) for job in prompt_jobs]
    return jobs if len(jobs) == 1 else [replace(job, slot=-1) for job in jobs]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request of OpenAI's kind asks for.

    count   answers to each prompt
    shown   how many likely tokens are told with each token; None: not even its own probability
    before  text with which each answer begins
    tools   those that answers may call
    thinks  whether answers begin within thoughts; None: thoughts are not told apart
    marks   what stands before and behind thoughts
    head    what may stand before an answer's words, see Style
    counted whether a stream ends with the counts of tokens
    timed   whether each event of a stream has the counts so far
    """

    jobs: list[Job]
    count: int
    shown: int | None
    before: tuple[str, ...] = ()
    tools: Tools | None = None
    thinks: bool | None = None
    marks: tuple[str, str] = MARKS
    head: str = ""
    counted: bool = False
    timed: bool = False


def counts_of(body: Body) -> dict[str, Any]:
    """Which counts a stream has."""
    name = "stream_options"
    counted = body.has(name) and Body(body.get(name), name).flag("include_usage")
    return {"counted": counted, "timed": body.flag("timings_per_token")}


def texts(server: Server, body: Body) -> Asked:
    """What /v1/completions is asked for. Raises InputError."""
    prompts = prompts_of(body.get("prompt"), server.tokenizer, MOST_ANSWERS)
    grammar = grammar_of(server, body)
    logprobs = body.get("logprobs")
    has_logprobs = bool(logprobs) if isinstance(logprobs, bool) else body.has("logprobs")
    top = 1 if logprobs is True else body.number("logprobs", 0, 0, MOST_TOP) if has_logprobs else 0
    shown = shown_of(body, has_logprobs, top)
    count = body.number("n", 1, 1, MOST_ANSWERS)
    if len(prompts) * count > MOST_ANSWERS:
        raise InputError(f"n: {len(prompts) * count} answers are asked for; at most {MOST_ANSWERS}")
    if body.text("suffix"):
        raise InputError("suffix is not supported: no text is inserted before another")
    if body.number("best_of", 1, 1) > count:
        raise InputError("best_of is not supported: ask for n answers, and choose")
    if body.flag("echo") and has_logprobs:
        raise InputError("echo with logprobs is not supported: ask for one of them")
    prompt_jobs = [job_of(server, body, prompt, grammar) for prompt in prompts]
    answers = count * len(prompt_jobs)
    jobs = [
        job
        for prompt_job in prompt_jobs
        for job in several(with_top(server, prompt_job, shown, answers), count)
    ]
    echoes = (server.tokenizer.decode(job.prompt) for job in jobs)
    before = tuple(echoes) if body.flag("echo") else ()
    return Asked(jobs, count, shown, before, **counts_of(body))


def shown_of(body: Body, has_logprobs: bool, top: int) -> int | None:
    """How many likely tokens are told; `n_probs` asks for them, too. Raises InputError."""
    n_probs = body.number("n_probs", 0, 0, MOST_TOP)
    return max(top, n_probs) if has_logprobs or n_probs else None


def chat(server: Server, body: Body) -> Asked:
    """What /v1/chat/completions is asked for. Raises InputError."""
    conversation = conversation_of(body)
    tools = Tools.of(body, conversation, server.style)
    text = prompt_text(server, body, conversation, tools)
    top, has_logprobs = body.number("top_logprobs", 0, 0, MOST_TOP), body.flag("logprobs")
    if top and not has_logprobs:
        raise InputError("top_logprobs requires logprobs to be true")
    shown = shown_of(body, has_logprobs, top)
    if tools and body.text("grammar"):
        raise InputError("tools and grammar exclude each other")
    grammar = (
        server.keep(tools.grammar(server.tokenizer, schema_of(body)), len(repr(tools.functions)))
        if tools
        else grammar_of(server, body)
    )
    job = job_of(server, body, server.ids(text), grammar)
    special = tools is not None and tools.has_tokens(server.tokenizer)
    count = body.number("n", 1, 1, MOST_ANSWERS)
    job = replace(with_top(server, job, shown, count), special=special)
    thinks, marks = thinks_of(server, body, text, conversation), server.marks or MARKS
    style_options: dict[str, Any] = {"thinks": thinks, "marks": marks, "head": server.style.head}
    return Asked(several(job, count), count, shown, tools=tools, **style_options, **counts_of(body))


def thinks_of(server: Server, body: Body, text: str, conversation: Conversation) -> bool | None:
    """Whether an answer begins within thoughts; None: they are not told apart. Raises InputError."""
    reasoning_format = body.text("reasoning_format", server.reasoning)
    if reasoning_format not in FORMATS:
        raise InputError(
            f"reasoning_format is {reasoning_format!r}; it must be one of {', '.join(FORMATS)}"
        )
    if reasoning_format == NONE or server.marks is None:
        return None
    last = conversation.messages[-1]
    return is_thinking(text, last["content"] if last["role"] == "assistant" else None, server.marks)


def conversation_of(body: Body) -> Conversation:
    """The messages and tools of a chat. Raises InputError."""
    if not isinstance(body.get("messages"), list) or not body.get("messages"):
        raise InputError("'messages' is required; it must be a list of at least one message")
    if body.has("functions", "function_call"):
        raise InputError(
            "functions and function_call are not supported", "send tools and tool_choice"
        )
    try:
        conversation = question(body.get("messages"), body.get("tools"), "request")
    except InputError as error:  # its advice is about files
        advice = "" if error.advice == WANTED else error.advice
        raise InputError(error.fact.removeprefix("request: "), advice) from None
    roles = ("system" if m["role"] == "developer" else m["role"] for m in conversation.messages)
    messages = [{**m, "role": role} for m, role in zip(conversation.messages, roles, strict=True)]
    if [m["role"] for m in messages[-2:]] == ["assistant", "assistant"]:
        raise InputError("messages: two of the assistant's stand at the end; one can be continued")
    return replace(conversation, messages=messages)


def variables_of(body: Body) -> dict[str, Any]:
    """Variables for the chat template: chat_template_kwargs, and how much is thought. Raises InputError."""
    variables = body.object("chat_template_kwargs")
    effort = body.text("reasoning_effort")
    if effort == "none":
        return variables | {"enable_thinking": False}
    return variables | ({"reasoning_effort": effort} if effort else {})


def begins_answer(body: Body, is_begun: bool) -> bool:
    """Whether the text ends with the beginning of an answer; `continue_final_message` asks for that, too."""
    begins = body.flag("add_generation_prompt", True)
    if body.flag("continue_final_message"):
        if body.has("add_generation_prompt") and begins:
            raise InputError("add_generation_prompt and continue_final_message exclude each other")
        if not is_begun:
            raise InputError("continue_final_message: the last message is not the assistant's")
    return begins or is_begun


def prompt_text(
    server: Server, body: Body, conversation: Conversation, tools: Tools | None = None
) -> str:
    """What the model reads: an answer that has begun is continued. Raises InputError."""
    messages = conversation.messages
    partial_answer: Message | None = messages[-1] if messages[-1]["role"] == "assistant" else None
    prompt = replace(conversation, messages=messages[:-1] if partial_answer else messages)
    if not prompt.messages:
        raise InputError("messages: there is nothing to answer before the assistant's message")
    if partial_answer and partial_answer.get("tool_calls"):
        raise InputError("messages: the last calls tools; their results must follow")
    if tools is None:
        prompt = replace(prompt, tools=None)
    elif not server.takes_tools:
        prompt = explained(prompt, server.style)
    begins = begins_answer(body, partial_answer is not None)
    text = server.prompt(prompt, variables_of(body), begins)
    return text + (partial_answer["content"] if partial_answer else "")
