"""Chat templates in short versions of our own, which give the texts that the models' own templates give."""

from dataclasses import dataclass

CHATML = """
{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA_3 = """
{%- macro head(role) %}{{ '<|start_header_id|>' ~ role ~ '<|end_header_id|>\n\n' }}{% endmacro %}
{%- set system = messages[0].content|trim if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{{- bos_token ~ head('system') ~ ('Environment: ipython\n' if tools else '') }}
{{- 'Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n' ~ system ~ '<|eot_id|>' }}
{%- for m in turns %}
    {%- if m.tool_calls is defined %}
        {%- set f = m.tool_calls[0].function %}
        {{- head('assistant') ~ '{"name": "' ~ f.name ~ '", "parameters": ' ~ f.arguments|tojson ~ '}' }}
    {%- elif m.role == 'tool' %}
        {{- head('ipython') ~ m.content|tojson }}
    {%- elif tools and loop.first %}
        {{- head('user') ~ 'Given the following functions, please respond with a JSON for a function call ' }}
        {{- 'with its proper arguments that best answers the given prompt.\n\n' }}
        {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its ' }}
        {{- 'value}.Do not use variables.\n\n' }}
        {%- for t in tools %}{{ t|tojson(indent=4) ~ '\n\n' }}{% endfor %}
        {{- m.content|trim }}
    {%- else %}{{ head(m.role) ~ m.content|trim }}{% endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""

# calls in a notation of its own, thoughts in a channel: written before calls alone, without end tokens before results
GEMMA_4 = """
{%- macro value(x) %}
    {%- if x is string %}{{ '<|"|>' ~ x ~ '<|"|>' }}
    {%- elif x is boolean %}{{ 'true' if x else 'false' }}
    {%- elif x is mapping %}{{ '{' }}{% for k, v in x|dictsort %}
        {{- k ~ ':' ~ value(v) ~ (',' if not loop.last else '') }}{% endfor %}{{ '}' }}
    {%- elif x is sequence %}{{ '[' }}{% for v in x %}
        {{- value(v) ~ (',' if not loop.last else '') }}{% endfor %}{{ ']' }}
    {%- else %}{{ x }}{% endif %}
{%- endmacro %}
{%- set ns = namespace(asked=-1, open=false) %}
{%- for m in messages if m.role == 'user' %}{% set ns.asked = messages.index(m) %}{% endfor %}
{{- bos_token }}
{%- if enable_thinking or tools or messages[0].role == 'system' %}
    {{- '<|turn>system\n' ~ ('<|think|>\n' if enable_thinking else '') }}
    {{- messages[0].content|trim if messages[0].role == 'system' else '' }}
    {%- for t in tools or [] %}{{ '<|tool>declaration:' ~ t.function.name ~ '{}<tool|>' }}{% endfor %}{{ '<turn|>\n' }}
{%- endif %}
{%- for m in (messages[1:] if messages[0].role == 'system' else messages) %}
    {%- if m.role == 'tool' %}
        {{- ('<|tool_response>' if loop.previtem.role == 'tool' else '') ~ 'response:' ~ (m.name or 'unknown') }}
        {{- '{value:' ~ value(m.content) ~ '}<tool_response|>' }}
    {%- else %}
        {{- '' if ns.open else '<|turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' }}
        {%- if m.tool_calls %}
            {%- if m.reasoning_content and messages.index(m) > ns.asked %}
                {{- '<|channel>thought\n' ~ m.reasoning_content ~ '\n<channel|>' }}
            {%- endif %}
            {%- for c in m.tool_calls %}
                {{- '<|tool_call>call:' ~ c.function.name ~ value(c.function.arguments) ~ '<tool_call|>' }}
            {%- endfor %}
            {{- m.content ~ '<|tool_response>' }}
        {%- else %}{{ m.content|trim ~ '<turn|>\n' }}{% endif %}
        {%- set ns.open = m.tool_calls is defined %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.open %}
    {{- '<|turn>model\n' ~ ('' if enable_thinking else '<|channel>thought\n<channel|>') }}
{%- endif %}"""
GEMMA_4_ENDS = "<turn|>", "<|tool_response>"

QWEN_TOOLS = """
{%- macro intro() %}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with ' }}
    {{- 'function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for t in tools %}{{ '\n' ~ t|tojson }}{% endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within ' }}
    {{- '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}' }}
    {{- '\n</tool_call><|im_end|>\n' }}
{%- endmacro %}
{%- macro call(c) %}{{ '<tool_call>\n{"name": "' ~ c.function.name ~ '", "arguments": ' ~ c.function.arguments|tojson }}
    {{- '}\n</tool_call>' }}{% endmacro %}
{%- macro result(m, before, after) %}
    {{- '<|im_start|>user' if before.role != 'tool' else '' }}
    {{- '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}
    {{- '<|im_end|>\n' if after.role != 'tool' else '' }}
{%- endmacro %}"""

QWEN_25 = f"""{QWEN_TOOLS}
{{%- set system = messages[0].content if messages[0].role == 'system' else
        'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' %}}
{{{{- '<|im_start|>system\\n' ~ system ~ ('\\n\\n' ~ intro() if tools else '<|im_end|>\\n') }}}}
{{%- for m in messages %}}
    {{%- if m.role == 'tool' %}}{{{{ result(m, loop.previtem, loop.nextitem or none) }}}}
    {{%- elif m.tool_calls %}}
        {{{{- '<|im_start|>assistant' ~ ('\\n' ~ m.content if m.content else '') }}}}
        {{%- for c in m.tool_calls %}}{{{{ '\\n' ~ call(c) }}}}{{% endfor %}}{{{{ '<|im_end|>\\n' }}}}
    {{%- elif not (loop.first and m.role == 'system') %}}
        {{{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}}}
    {{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}"""

QWEN_3 = f"""{QWEN_TOOLS}
{{%- set system = messages[0].content if messages[0].role == 'system' else '' %}}
{{%- if tools %}}{{{{ '<|im_start|>system\\n' ~ (system ~ '\\n\\n' if system else '') ~ intro() }}}}
{{%- elif system %}}{{{{ '<|im_start|>system\\n' ~ system ~ '<|im_end|>\\n' }}}}{{% endif %}}
{{%- set ns = namespace(query=0) %}}
{{%- for m in messages %}}{{% if m.role == 'user' %}}{{% set ns.query = loop.index0 %}}{{% endif %}}{{% endfor %}}
{{%- for m in messages %}}
    {{%- if m.role == 'tool' %}}{{{{ result(m, loop.previtem, loop.nextitem or none) }}}}
    {{%- elif m.role == 'assistant' %}}
        {{%- set thought, words = '', m.content %}}
        {{%- if '</think>' in words %}}
            {{%- set thought = words.split('</think>')[0].split('<think>')[-1].strip('\\n') %}}
            {{%- set words = words.split('</think>')[-1].lstrip('\\n') %}}
        {{%- endif %}}
        {{{{- '<|im_start|>assistant\\n' }}}}
        {{%- if loop.index0 > ns.query and (loop.last or thought) %}}
            {{{{- '<think>\\n' ~ thought ~ '\\n</think>\\n\\n' ~ words.lstrip('\\n') }}}}
        {{%- else %}}{{{{ words }}}}{{% endif %}}
        {{%- for c in m.tool_calls %}}
            {{{{- ('\\n' if words or not loop.first else '') ~ call(c) }}}}
        {{%- endfor %}}{{{{ '<|im_end|>\\n' }}}}
    {{%- elif not (loop.first and m.role == 'system') %}}
        {{{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}}}
    {{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}"""

GEMMA = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 is even) %}{{ raise_exception('Roles must alternate') }}{% endif %}
    {{- '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' }}
    {{- m.content|trim ~ '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

PHI_3 = """
{%- for m in messages if m.role in ('system', 'user', 'assistant') %}
    {{- '<|' ~ m.role ~ '|>\n' ~ m.content ~ '<|end|>\n' }}
{%- endfor %}
{{- '<|assistant|>\n' if add_generation_prompt else eos_token }}"""

MISTRAL = """
{%- set system = messages[0].content ~ '\n\n' if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if system else messages %}
{%- set last = turns|selectattr('role', 'equalto', 'user')|list|last %}
{{- bos_token }}
{%- for m in turns %}
    {%- if m.role == 'user' %}
        {{- '[AVAILABLE_TOOLS]' ~ tools|tojson ~ '[/AVAILABLE_TOOLS]' if tools and m == last }}
        {{- '[INST]' ~ (system if loop.last) ~ m.content ~ '[/INST]' }}
    {%- elif m.tool_calls is defined %}
        {{- '[TOOL_CALLS][' }}
        {%- for c in m.tool_calls %}
            {%- if c.id|length != 9 %}{{ raise_exception('Tool call IDs should have length 9!') }}{% endif %}
            {{- (c.function|tojson)[:-1] ~ ', "id": "' ~ c.id ~ '"}' ~ (', ' if not loop.last) }}
        {%- endfor %}{{ ']' ~ eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' ~ m.content ~ ', "call_id": "' ~ m.tool_call_id ~ '"}[/TOOL_RESULTS]' }}
    {%- else %}{{ m.content ~ eos_token }}{% endif %}
{%- endfor %}"""


@dataclass(frozen=True)
class Chat:
    """A template and its model's texts of BOS and EOS, of tokens that end a reply, and of all special tokens."""

    source: str
    bos: str
    eos: str
    eog_texts: tuple[str, ...]
    special: tuple[str, ...]
    vocabulary: str | None  # of the shared data


IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
IM_ENDS = ("<|im_end|>", "<|endoftext|>")
LLAMA_ENDS = ("<|eot_id|>", "<|end_of_text|>")
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", *LLAMA_ENDS)
PHI = ("<s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>")
CHATS = {
    "chatml": Chat(CHATML, "", "<|im_end|>", IM_ENDS, IM, "qwen2"),
    "llama-3": Chat(LLAMA_3, LLAMA[0], "<|eot_id|>", LLAMA_ENDS, LLAMA, "llama-bpe"),
    "qwen2.5": Chat(QWEN_25, "", "<|im_end|>", IM_ENDS, IM, "qwen2"),
    "qwen3": Chat(QWEN_3, "", "<|im_end|>", IM_ENDS, IM, "qwen2"),
    "gemma": Chat(GEMMA, "<bos>", "<eos>", ("<end_of_turn>", "<eos>"),
                  ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), None),
    "phi-3": Chat(PHI_3, "<s>", "<|endoftext|>", ("<|end|>", "<|endoftext|>"), PHI, "phi-3"),
    "mistral": Chat(MISTRAL, "<s>", "</s>", ("</s>",), ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"), None),
}  # fmt: skip
