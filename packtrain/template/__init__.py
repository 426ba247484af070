"""Chat templates: messages in, the text that a model was trained on out, rendered by a child process that can be ended.

A template comes from a file that nobody has checked. It runs in Jinja's sandbox, in a process of its own, with a
limit on time, on memory (where the system has one) and on the length of its text. For a model without one there are
templates of known families.
"""

from packtrain.template.chat import ChatTemplate, TemplateError, template_source
from packtrain.template.families import CHATML, SOURCES, Chosen, chosen, named

__all__ = [
    "CHATML",
    "SOURCES",
    "ChatTemplate",
    "Chosen",
    "TemplateError",
    "chosen",
    "named",
    "template_source",
]
