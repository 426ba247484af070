"""Chat with a model.

The file's chat template renders the conversation each time; only the new tokens go through the model."""

from dataclasses import dataclass

from packtrain.common.errors import InputError, name_keywords
from packtrain.common.events import Events
from packtrain.common.options import option
from packtrain.common.text import plural
from packtrain.data.chat_template import ChatTemplate, answer_variables
from packtrain.inference.generator import GenerationLimits, Reply
from packtrain.training.run_settings import CHAT_TEMPLATE
from packtrain.workflows import generation_settings
from packtrain.workflows.generation_settings import GeneratedText, GenerationSettings, make_drafters
from packtrain.workflows.tool_call_scores import ToolCallReader


class ConversationTooLong(InputError):
    """A conversation that leaves no room for an answer."""


@dataclass(frozen=True)
class ChatSettings(GenerationSettings):
    """Chat with a model."""

    COMMON = "system n_predict temp top_k top_p seed lora ctx chat_template"

    system: str | None = option(None, "system message", flags="-sys")
    n_predict: int = option(
        1024, "most tokens of an answer; -1: until the context is full", flags="-n", min_value=-1
    )
    chat_template: str | None = option(None, CHAT_TEMPLATE, metavar="NAME|FILE|TEXT")
    reasoning: str = generation_settings.REASONING()


@name_keywords
class ChatSession:
    """A conversation: its messages, and the model that answers."""

    def __init__(self, settings: ChatSettings, events: Events) -> None:
        """Open the model. Raises InputError, DoesNotFit; Interrupted if it is stopped while --warmup reads experts."""
        settings.check()
        model = generation_settings.opened(settings, events.message)
        self._settings, self._events, self.tokenizer = settings, events, model.tokenizer()
        self._grammar = generation_settings.load_grammar(settings, self.tokenizer)
        template = generation_settings.choose_chat_template(settings.chat_template, model, events)
        self._template_source = template
        ids = self.tokenizer.bos, self.tokenizer.eos
        self._bos, eos = (generation_settings.token_text(self.tokenizer, id) for id in ids)
        self._template = ChatTemplate(template, self._bos, eos)
        self.cells = generation_settings.cells(
            settings, model.config, generation_settings.CONTEXT, events
        )
        generation_settings.warm(settings, model, events)
        self._drafter = next(iter(make_drafters(settings, model, self.cells)), None)
        self._generator = generation_settings.load_generator(settings, model, self.cells)
        self._seed, self._num_answers = settings.drawn_seed(), 0
        self.max_tokens = settings.n_predict
        self.messages: list[dict[str, str]] = []
        self.clear()

    def __repr__(self) -> str:
        return f"ChatSession({self._settings.model}: {plural(len(self.messages), 'message')})"

    def clear(self) -> None:
        """Start over with nothing but the system message."""
        system = self._settings.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def retract(self) -> str | None:
        """Remove the user's last message and all after it; return that message, or None if there is none."""
        while self.messages and self.messages[-1]["role"] != "system":
            message = self.messages.pop()
            if message["role"] == "user":
                return message["content"]
        return None

    def answer(self, text: str) -> GeneratedText:
        """Return the answer to a message, and report its text as it comes; on InputError the message is removed."""
        self.messages.append({"role": "user", "content": text})
        try:
            variables = answer_variables(self._settings.reasoning != "off")
            generated = self.reply(self._template.render(self.messages, None, True, variables))
        except InputError:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": generated.text.strip()})
        return generated

    def _prompt_ids(self, prompt_text: str) -> list[int]:
        """Return token ids of a rendered conversation, with at most one BOS."""
        has_bos = bool(self._bos) and prompt_text.startswith(self._bos)
        prompt_ids = self.tokenizer.encode(prompt_text, bos=False if has_bos else None, eos=False)
        if len(prompt_ids) >= self.cells:
            raise ConversationTooLong(
                f"the conversation has {len(prompt_ids):,} tokens and the context {self.cells:,};"
                " start a new one, or make room for more (--ctx)"
            )
        return prompt_ids

    def tool_call_reader(self) -> ToolCallReader:
        """Return a reader that renders conversations with tools by the template, and parses calls in answers."""
        eog_texts = [
            generation_settings.token_text(self.tokenizer, id) for id in self.tokenizer.eog_ids
        ]
        return ToolCallReader(self._template, self._template_source, eog_texts)

    def reply(self, prompt_text: str) -> GeneratedText:
        """Answer a rendered conversation by the next seed; `messages` stay as they are. Raises ConversationTooLong."""
        ids, s = self._prompt_ids(prompt_text), self._settings
        seed = (self._seed + self._num_answers) % (generation_settings.MAX_SEED + 1)
        self._num_answers += 1
        with self._events.stopping() as stopped:
            limits = GenerationLimits(s.n_predict, s.stop, stopped, s.loop_tokens)
            options = self._drafter, s.draft_max, self._grammar
            reply = Reply(self._generator, self.tokenizer, ids, s.sampling, seed, limits, *options)
            return generation_settings.generate_reply(reply, seed, self._events)
