"""Chat templates: render messages as the text that a model was trained on, in a child process that can be killed.

A template comes from an untrusted file. It runs in Jinja's sandbox, in its own process, with limits on time, memory
(where the system supports that) and the length of its text. A model without a template gets that of a known family."""

from packtrain.data.chat_template.template_families import (
    CHATML, TEMPLATES, TemplateChoice, choose_template, load_template,
)  # fmt: skip
from packtrain.data.chat_template.template_language import (
    MEMORY_NBYTES, ChatTemplate, TemplateError, answer_variables, template_source,
)  # fmt: skip
