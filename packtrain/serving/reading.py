"""Requests become jobs: prompts, settings and grammars. Runs in threads of its own, since texts may be long."""

import json
from dataclasses import dataclass, replace
from typing import Any

from packtrain.errors import InputError
from packtrain.grammar import Grammar
from packtrain.samples.messages import Conversation, Message, question
from packtrain.serving.asked import (
    MOST_ANSWERS,
    MOST_TOP,
    Body,
    adapters_of,
    prompts_of,
    sampling_of,
    seed_of,
    stops_of,
)
from packtrain.serving.jobs import Job
from packtrain.serving.server import Server
from packtrain.serving.tools import Tools, explained

LONGEST_GRAMMAR = 1 << 18  # characters
MOST_TOLD = 1 << 18  # probabilities of an answer


def job_of(server: Server, body: Body, prompt: list[int], grammar: Grammar | None) -> Job:
    """What an answer needs, but for probabilities. Raises InputError."""
    count = -1
    for name in ("n_predict", "max_tokens", "max_completion_tokens"):
        count = body.number(name, count, -1, 1 << 30)
    most = server.limits.answer
    return Job(
        prompt=tuple(prompt),
        sampling=sampling_of(body, server.sampling, server.tokenizer),
        seed=seed_of(body, server.seed),
        count=count if most < 0 else most if count < 0 else min(count, most),
        stops=stops_of(body),
        grammar=grammar,
        slot=body.number("id_slot", -1, -1, 1 << 30),
        reuse=body.flag("cache_prompt", True),
        adapters=adapters_of(body.get("lora"), server.scales),
        endless=body.flag("ignore_eos"),
    )


def with_top(server: Server, job: Job, top: int) -> Job:
    """The job with `top` probabilities for each token. Raises InputError if these are too many to keep."""
    most = server.engine.limit if job.count < 0 else min(job.count, server.engine.limit)
    if top * most > MOST_TOLD:
        raise InputError(
            f"{top} probabilities of {most:,} tokens are more than {MOST_TOLD:,}; ask for fewer, or set max_tokens"
        )
    return replace(job, top=top)


def several(job: Job, count: int) -> list[Job]:
    """Answers to the same prompt, each with the seed after that of the one before; any slot may take them."""
    if count == 1:
        return [job]
    return [replace(job, seed=job.seed + n, slot=-1) for n in range(count)]


def grammar_of(server: Server, body: Body) -> Grammar | None:
    """The grammar that a request asks for in any of the ways there are. Raises InputError."""
    text = body.text("grammar", "", LONGEST_GRAMMAR)
    schema, wanted = body.get("json_schema"), body.get("response_format")
    if wanted is not None:
        found = schema_of(Body(wanted, "response_format"))
        schema = found if found is not None else schema
    if text and schema is not None:
        raise InputError("grammar and json_schema exclude each other")
    if schema is not None:
        written = json.dumps(schema)
        if len(written) > LONGEST_GRAMMAR:
            raise InputError(f"json_schema has more than {LONGEST_GRAMMAR:,} characters")
        return Grammar.from_schema(server.tokenizer, written)
    return Grammar.from_gbnf(server.tokenizer, text) if text else None


def schema_of(wanted: Body) -> Any:
    """The schema of a response_format, if it has one. Raises InputError."""
    kind = wanted.text("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = wanted.get("schema")
        return {"type": "object"} if schema is None else schema
    if kind == "json_schema":
        within = Body(wanted.get("json_schema") or wanted.get("schema"), "json_schema")
        return within.get("schema") if within.has("schema") else {}
    raise InputError(
        f"response_format.type is {kind!r}; it must be text, json_object or json_schema"
    )


# ---- each kind of request


def completions(server: Server, body: Body) -> list[Job]:
    """Jobs of /completion. Raises InputError."""
    prompts = prompts_of(body.get("prompt"), server.tokenizer, MOST_ANSWERS)
    grammar = grammar_of(server, body)
    top = body.number("n_probs", 0, 0, server.tokenizer.vocab_size)
    jobs = [with_top(server, job_of(server, body, prompt, grammar), top) for prompt in prompts]
    return jobs if len(jobs) == 1 else [replace(job, slot=-1) for job in jobs]


def texts(server: Server, body: Body) -> list[Job]:
    """Jobs of /v1/completions. Raises InputError."""
    prompts = prompts_of(body.get("prompt"), server.tokenizer, MOST_ANSWERS)
    grammar = grammar_of(server, body)
    told = body.get("logprobs")
    top = int(told) if isinstance(told, bool) else body.number("logprobs", 0, 0, MOST_TOP)
    top = max(top, body.number("n_probs", 0, 0, MOST_TOP))
    count = body.number("n", 1, 1, MOST_ANSWERS)
    if len(prompts) * count > MOST_ANSWERS:
        raise InputError(f"n: {len(prompts) * count} answers are asked for; at most {MOST_ANSWERS}")
    return [
        job
        for prompt in prompts
        for job in several(with_top(server, job_of(server, body, prompt, grammar), top), count)
    ]


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat request: its jobs, and the tools that answers may call."""

    jobs: list[Job]
    tools: Tools | None


def chat(server: Server, body: Body) -> Chat:
    """Jobs of /v1/chat/completions. Raises InputError."""
    conversation = conversation_of(body)
    tools = Tools.of(body, conversation, server.source)
    text = prompt_text(server, conversation, tools)
    top = body.number("top_logprobs", 0, 0, MOST_TOP) if body.flag("logprobs") else 0
    top = max(top, body.number("n_probs", 0, 0, MOST_TOP), body.flag("logprobs"))
    if tools and body.has("grammar", "json_schema"):
        raise InputError("tools and grammar exclude each other")
    grammar = tools.grammar(server.tokenizer) if tools else grammar_of(server, body)
    job = job_of(server, body, server.ids(text), grammar)
    special = tools is not None and tools.token(server.tokenizer) is not None
    job = replace(with_top(server, job, top), special=special)
    return Chat(several(job, body.number("n", 1, 1, MOST_ANSWERS)), tools)


def conversation_of(body: Body) -> Conversation:
    """The messages and tools of a chat. Raises InputError."""
    if not isinstance(body.get("messages"), list):
        raise InputError("'messages' is required; it must be a list of messages")
    found = question(body.get("messages"), body.get("tools"), "request")
    roles = ("system" if m["role"] == "developer" else m["role"] for m in found.messages)
    messages = [{**m, "role": role} for m, role in zip(found.messages, roles, strict=True)]
    if [m["role"] for m in messages[-2:]] == ["assistant", "assistant"]:
        raise InputError("messages: two of the assistant's stand at the end; one can be continued")
    return replace(found, messages=messages)


def prompt_text(server: Server, conversation: Conversation, tools: Tools | None = None) -> str:
    """What the model reads: an answer that has begun is continued. Raises InputError."""
    messages = conversation.messages
    begun: Message | None = messages[-1] if messages[-1]["role"] == "assistant" else None
    asked = replace(conversation, messages=messages[:-1] if begun else messages)
    if not asked.messages:
        raise InputError("messages: there is nothing to answer before the assistant's message")
    if tools is None:
        asked = replace(asked, tools=None)
    elif not server.takes_tools:
        asked = explained(asked)
    return server.prompt(asked) + (begun["content"] if begun else "")
