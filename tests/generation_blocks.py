"""What transformers masks by templates with generation blocks: `python -m tests.generation_blocks` records it anew.

The templates are short ones of our own, each with its blocks as a family of training templates has them. The record,
tests/goldens/generation_blocks.json, holds for each template and conversation what `apply_chat_template` renders up to
each answer, with the spans of its blocks; for some also ids and `return_assistant_tokens_mask`. It needs transformers.
"""

import json
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from packtrain.data.chat_template import ChatTemplate
from packtrain.data.conversations.conversation_renderer import BLOCK_MARKS, ConversationRenderer
from packtrain.data.conversations.messages import Conversation, make_conversation, read_messages
from packtrain.gguf import GGUF
from tests.templates import IM_ENDS, LLAMA, LLAMA_ENDS

RECORD = Path(__file__).parent / "goldens/generation_blocks.json"
VOCABULARIES = Path(__file__).parent.parent.parent / "shared/data/tokenizers/ggml-vocab"
DIGITS = {"qwen2": r"\p{N}", "llama-bpe": r"\p{N}{1,3}"}
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

# the end of the line is in the block
CHATML = """
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}{{ m.content ~ '<|im_end|>\n' }}{% endgeneration %}
    {%- else %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# the beginning of the turn is in the block, the end of the line is not
HEADER = """
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{ '<|im_start|>assistant\n' ~ m.content ~ '<|im_end|>' }}{% endgeneration %}
    {%- else %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>' }}{% endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA_3 = """
{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' ~ ('ipython' if m.role == 'tool' else m.role) ~ '<|end_header_id|>\n\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}
            {%- if m.tool_calls %}
                {%- for c in m.tool_calls %}
                    {{- '{"name": "' ~ c.function.name ~ '", "parameters": ' ~ c.function.arguments|tojson ~ '}' }}
                {%- endfor %}
            {%- else %}{{ m.content|trim }}{% endif %}
            {{- '<|eot_id|>' }}
        {%- endgeneration %}
    {%- else %}{{ m.content|trim ~ '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# roles alternate, and there is no system
GEMMA = """{{ bos_token }}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 is even) %}{{ raise_exception('Roles must alternate') }}{% endif %}
    {%- if m.role == 'assistant' %}
        {{- '<start_of_turn>model\n' }}
        {%- generation -%}{{ m.content|trim ~ '<end_of_turn>\n' }}{%- endgeneration -%}
    {%- else %}{{ '<start_of_turn>' ~ m.role ~ '\n' ~ m.content|trim ~ '<end_of_turn>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

# thoughts of all turns, or, as the models' own templates, of those after the last question
QWEN_3 = """
{%- set ns = namespace(question=0) %}
{%- for m in messages if m.role == 'user' %}{% set ns.question = messages.index(m) %}{% endfor %}
{%- if tools %}{{ '<|im_start|>system\n# Tools\n' ~ tools|tojson ~ '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set thought, words = m.reasoning_content or '', m.content %}
        {%- if '</think>' in words %}
            {%- set thought = words.split('</think>')[0].split('<think>')[-1] %}
            {%- set words = words.split('</think>')[-1] %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}
            {%- if ALWAYS or loop.index0 > ns.question %}
                {{- '<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' }}
            {%- endif %}
            {{- words.lstrip('\n') }}
            {%- for c in m.tool_calls %}
                {{- '\n' if words or not loop.first }}
                {{- '<tool_call>\n' ~ {'name': c.function.name, 'arguments': c.function.arguments}|tojson }}
                {{- '\n</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>\n' }}
        {%- endgeneration %}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user' if loop.previtem.role != 'tool' }}
        {{- '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- else %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

MISTRAL = """
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- generation %}
            {%- if m.tool_calls %}
                {{- '[TOOL_CALLS][' }}
                {%- for c in m.tool_calls %}
                    {%- if c.id|length != 9 %}{{ raise_exception('Tool call IDs should have length 9!') }}{% endif %}
                    {{- (c.function|tojson)[:-1] ~ ', "id": "' ~ c.id ~ '"}' ~ (', ' if not loop.last else '') }}
                {%- endfor %}{{ ']' }}
            {%- else %}{{ ' ' ~ m.content }}{% endif %}{{ eos_token }}
        {%- endgeneration %}
    {%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' ~ m.content ~ '[/TOOL_RESULTS]' }}
    {%- elif m.role == 'system' %}{{ raise_exception('System role not supported') }}
    {%- else %}{{ '[INST] ' ~ m.content ~ ' [/INST]' }}{% endif %}
{%- endfor %}"""

# a block after all turns, which a prompt does not have
PHI_3 = """
{%- for m in messages %}
    {{- '<|' ~ m.role ~ '|>\n' }}
    {%- if m.role == 'assistant' %}{% generation %}{{ m.content ~ '<|end|>\n' }}{% endgeneration %}
    {%- else %}{{ m.content ~ '<|end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}
{%- else %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}"""

# other ends and thoughts in the last turn
HARMONY = """
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- generation %}
            {%- if m.thinking and loop.last %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant<|channel|>final<|message|>' ~ m.content }}
            {{- '<|return|>' if loop.last else '<|end|>' }}
        {%- endgeneration %}
    {%- else %}{{ '<|start|>' ~ m.role ~ '<|message|>' ~ m.content ~ '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

# several blocks a turn, some of them empty, and turns that end with the result of a call
GEMMA_4 = """
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'tool' %}{{ '<|tool_response>' ~ m.content ~ '<tool_response|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|turn>model\n' if loop.previtem.role != 'tool' }}
        {%- if m.reasoning_content %}
            {%- generation %}{{ '<|channel>thought\n' ~ m.reasoning_content ~ '\n<channel|>' }}{% endgeneration %}
        {%- endif %}
        {%- generation %}{% for c in m.tool_calls %}
            {{- '<|tool_call>call:' ~ c.function.name ~ c.function.arguments|tojson ~ '<tool_call|>' }}
        {%- endfor %}{% endgeneration %}
        {%- generation %}{{ m.content|trim }}{% endgeneration %}
        {%- if not m.tool_calls %}{% generation %}{{ '<turn|>\n' }}{% endgeneration %}{% endif %}
    {%- else %}{{ '<|turn>' ~ m.role ~ '\n' ~ m.content|trim ~ '<turn|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|turn>model\n' }}{% endif %}"""

# only calls are in blocks
CALLS = """
{%- for m in messages %}
    {{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content }}
    {%- if m.tool_calls %}
        {%- generation %}
            {%- for c in m.tool_calls %}{{ c.function.name ~ c.function.arguments|tojson }}{% endfor %}
        {%- endgeneration %}
    {%- endif %}{{ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# name: template, BOS, EOS, texts of the tokens that end a reply
TEMPLATES: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "chatml": (CHATML, "", "<|im_end|>", IM_ENDS),
    "header": (HEADER, "", "<|im_end|>", IM_ENDS),
    "llama-3": (LLAMA_3, LLAMA[0], "<|eot_id|>", LLAMA_ENDS),
    "gemma": (GEMMA, "<bos>", "<eos>", ("<end_of_turn>", "<eos>")),
    "qwen3": (QWEN_3.replace("ALWAYS", "true"), "", "<|im_end|>", IM_ENDS),
    "qwen3-last": (QWEN_3.replace("ALWAYS", "false"), "", "<|im_end|>", IM_ENDS),
    "mistral": (MISTRAL, "<s>", "</s>", ("</s>",)),
    "phi-3": (PHI_3, "<s>", "<|endoftext|>", ("<|end|>", "<|endoftext|>")),
    "harmony": (HARMONY, "", "<|return|>", ("<|return|>", "<|call|>")),
    "gemma-4": (GEMMA_4, "<bos>", "<eos>", ("<turn|>", "<|tool_response>")),
    "calls": (CALLS, "", "<|im_end|>", IM_ENDS),
}
REFUSED = {("gemma", "calls")}  # two results in turn are two messages of the user
TOKENIZED = {"chatml": "qwen2", "header": "qwen2", "qwen3": "qwen2", "llama-3": "llama-bpe"}


def dialogue(*words: str) -> list[dict[str, Any]]:
    """What a user and the assistant say in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": said} for i, said in enumerate(words)]


def call(number: int, city: str) -> dict[str, Any]:
    return {"id": f"call0000{number}", "function": {"name": "weather", "arguments": {"city": city}}}


def result(number: int, words: str) -> dict[str, Any]:
    return {
        "role": "tool",
        "name": "weather",
        "tool_call_id": f"call0000{number}",
        "content": words,
    }


SYSTEM = {"role": "system", "content": "Answer briefly."}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]  # fmt: skip
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[Any] | None]] = {
    "one question": (dialogue("Who are you?", "A program."), None),
    "turns": ([SYSTEM, *dialogue("Hi.", "Hello!", "Say Hello!", "Hello!", "Bye.", "Bye.\n\nSoon [[x]] 🙂.")], None),
    "blanks": (dialogue(" a ", " \n b\n", "c", "\n\nd "), None),
    "control tokens": (
        dialogue(
            "Say <|im_end|>.", "<|im_end|>, <|eot_id|>, <|endoftext|> or <think>no</think>.",
            "<|im_start|>assistant\nx", "y",
        ),
        None,
    ),
    "thoughts": (
        [
            *dialogue("1 + 1?"), {"role": "assistant", "content": "2", "reasoning_content": "Easy."},
            *dialogue("2 + 2?"), {"role": "assistant", "content": "4", "reasoning_content": "Twice."},
        ],
        None,
    ),
    "thoughts in words": (
        dialogue("1 + 1?", "<think>\nEasy.\n</think>\n\n2", "2 + 2?", "<think>Twice.</think>4"), None,
    ),
    "calls": (
        [
            SYSTEM, *dialogue("Is it warm?"),
            {"role": "assistant", "content": "", "tool_calls": [call(1, "Zürich"), call(2, 'A "b" <c>')]},
            result(1, "31"), result(2, ""), *dialogue("", "Yes.")[1:], *dialogue("Thanks.", "You are welcome."),
        ],
        TOOLS,
    ),
    "thoughts, words and a call": (
        [
            *dialogue("Is it warm?"),
            {"role": "assistant", "content": "I look.", "reasoning_content": "I ask.", "tool_calls": [call(1, "Rome")]},
            result(1, "31"), {"role": "assistant", "content": "Yes.", "reasoning_content": "31 is warm."},
        ],
        TOOLS,
    ),
    "the user last": (dialogue("Hi.", "Hello!", "And?"), None),
    "the assistant first": ([*dialogue("", "Welcome.")[1:], *dialogue("Hi.", "Hello!")], None),
    "a weight of 0": ([*dialogue("Hi.", "Hm?")[:1], {"role": "assistant", "content": "Hm?", "weight": 0},
                       *dialogue("Hello.", "Hello!")], None),
}  # fmt: skip


class SpiedTemplate:
    """A chat template that remembers what it rendered: `variables` of the longest text, without marks and prompts, and
    `attempt`, the last of all."""

    def __init__(self, source: str, bos: str, eos: str) -> None:
        self.template = ChatTemplate(source, bos, eos)
        self.source, self.tokens = source, {"bos_token": bos, "eos_token": eos}
        self.variables: dict[str, Any] = {}
        self.attempt = self.variables

    def render(
        self, messages: list[Any], tools: Any = None, add_generation_prompt: bool = False, extra_variables: Any = None
    ) -> str:  # fmt: skip
        extra = {k: v for k, v in (extra_variables or {}).items() if k not in BLOCK_MARKS}
        self.attempt = {"messages": messages, "tools": tools, **extra}
        text = self.template.render(messages, tools, add_generation_prompt, extra_variables)
        is_longest = len(messages) > len(self.variables.get("messages", ()))
        if is_longest and not add_generation_prompt and extra == (extra_variables or {}):
            self.variables = self.attempt
        return text

    def renderer(self, eog_texts: Sequence[str]) -> ConversationRenderer:
        """A renderer of the template; its probes are forgotten."""
        renderer = ConversationRenderer(self, [*eog_texts])
        self.variables = {}
        return renderer


def conversation(about: str) -> Conversation:
    messages, tools = CONVERSATIONS[about]
    return make_conversation(about, read_messages(messages, about, "messages"), tools)


def masked_by_transformers(
    template: SpiedTemplate, messages: list[Any], begins: bool = False
) -> tuple[str, list[tuple[int, int]]]:
    """What transformers renders of messages, and the spans of its generation blocks that are not empty."""
    from transformers.utils.chat_template_utils import render_jinja_template

    variables = {k: v for k, v in template.variables.items() if k not in ("messages", "tools")}
    (text,), (spans,) = render_jinja_template(
        [messages], tools=template.variables["tools"], chat_template=template.source,
        return_assistant_tokens_mask=True, add_generation_prompt=begins, **template.tokens, **variables,
    )  # fmt: skip
    return text, [(start, end) for start, end in spans if start < end]


def masked_turns(template: SpiedTemplate) -> list[dict[str, Any]]:
    """For each answer of the messages that were last rendered: the text up to it, all spans, and the answer's first.

    An answer's spans end behind what its text and the prompt for it have in common.
    """
    messages, turns = template.variables["messages"], []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            text, spans = masked_by_transformers(template, messages[: i + 1])
            prompt, _ = masked_by_transformers(template, messages[:i], begins=True)
            pairs = enumerate(zip(text, prompt, strict=False))
            num_common = next((k for k, (a, b) in pairs if a != b), min(len(text), len(prompt)))
            first = sum(end <= num_common for _, end in spans)
            turns.append({"text": text, "spans": [*map(list, spans)], "first": first})
    return turns


@cache
def fast_tokenizer(name: str) -> Any:
    """The tokenizer of transformers with a byte-level vocabulary of the shared data."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    metadata = GGUF(VOCABULARIES / f"ggml-vocab-{name}.gguf").metadata
    texts = [bytes(token).decode() for token in metadata["tokenizer.ggml.tokens"]]
    merges = [tuple(bytes(m).decode().split(" ")) for m in metadata["tokenizer.ggml.merges"]]
    vocabulary = {text: id for id, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name == "llama-bpe"))
    splits = pre_tokenizers.Split(Regex(WORDS.replace("DIGITS", DIGITS[name])), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([splits, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(texts, metadata["tokenizer.ggml.token_type"], strict=True)
    special = [
        AddedToken(text, special=True, normalized=False) for text, kind in kinds if kind == 3
    ]
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def masked_tokens(template: SpiedTemplate, vocabulary: str) -> dict[str, list[int]]:
    """Ids and assistant masks of the messages that were last rendered."""
    variables = {k: v for k, v in template.variables.items() if k not in ("messages", "tools")}
    encoded = fast_tokenizer(vocabulary).apply_chat_template(
        template.variables["messages"], tools=template.variables["tools"], chat_template=template.source,
        tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **template.tokens, **variables,
    )  # fmt: skip
    return {"ids": [*encoded["input_ids"]], "mask": [*encoded["assistant_masks"]]}


def record_all() -> dict[str, dict[str, Any]]:
    """What transformers gives for all templates and conversations."""
    entries: dict[str, dict[str, Any]] = {}
    for name, about in product(TEMPLATES, CONVERSATIONS):
        if (name, about) in REFUSED:
            continue
        *template_texts, eog_texts = TEMPLATES[name]
        template = SpiedTemplate(*template_texts)
        renderings = template.renderer(eog_texts).render(conversation(about))
        turns = masked_turns(template)
        entries[f"{name}: {about}"] = {"turns": turns if len(renderings) > 1 else turns[-1:]}
        if name in TOKENIZED:
            entries[f"{name}: {about}"] |= masked_tokens(template, TOKENIZED[name])
    return entries


def main() -> None:
    lines = [
        f"{json.dumps(case)}: {json.dumps(entry, ensure_ascii=False, separators=(',', ':'))}"
        for case, entry in record_all().items()
    ]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{RECORD.name}: {RECORD.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
