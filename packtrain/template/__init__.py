"""Chat templates: messages in, the text that a model was trained on out, rendered by a child process that can be ended.

A template comes from a file that nobody has checked. It runs in Jinja's sandbox, in a process of its own, with a
limit on time, on memory (where the system has one) and on the length of its text. It knows no tokens and no files.
"""

from packtrain.template.chat import CHATML, ChatTemplate, TemplateError, template_source

__all__ = ["CHATML", "ChatTemplate", "TemplateError", "template_source"]
