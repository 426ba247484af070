"""What a model thinks before it answers, told apart from the answer (llama-server: --reasoning-format deepseek)."""

OPEN, CLOSE = "<think>", "</think>"
AUTO, NONE, DEEPSEEK = "auto", "none", "deepseek"
FORMATS = (AUTO, NONE, DEEPSEEK)
MARKS = OPEN, CLOSE


def marks_of(template: str, template_marks: tuple[str, str]) -> tuple[str, str] | None:
    """What stands around thoughts: <think>, or the template's own, as Gemma 4's channel; None: there are none."""
    opened, closed = template_marks[0].strip(), template_marks[1].strip()
    return MARKS if CLOSE in template else (opened, closed) if opened and closed else None


def is_thinking(prompt: str, partial_answer: str | None, marks: tuple[str, str] = MARKS) -> bool:
    """Whether the text that an answer goes on from, a prompt or the answer that has begun, ends within thoughts."""
    if partial_answer is not None:
        return partial_answer.rfind(marks[0]) > partial_answer.rfind(marks[1])
    return prompt.rstrip().endswith(marks[0])


class Thoughts:
    """Splits an answer into thoughts and content, piece by piece. Space around thoughts belongs to neither.

    thinking  the answer begins within thoughts: its prompt has opened them
    marks     what stands before and behind thoughts
    """

    def __init__(self, thinking: bool, marks: tuple[str, str] = MARKS) -> None:
        self._open, self._close = marks
        self._thinking, self._begun, self._held = thinking, thinking, ""
        self._bare = thinking  # what comes next has no space before it

    def add(self, piece: str) -> tuple[str, str]:
        """The thoughts and the content that are certain now."""
        text = self._held + piece
        self._held = ""
        if not self._begun:
            words = text.lstrip()
            if len(words) < len(self._open) and self._open.startswith(words):
                self._held = text
                return "", ""
            self._begun, self._thinking = True, words.startswith(self._open)
            if self._thinking:
                text, self._bare = words.removeprefix(self._open), True
        if not self._thinking:
            return "", self._trimmed(text)
        thought, end, content = text.partition(self._close)
        if not end:
            keep = _unsure(text, self._close)
            self._held = text[keep:]
            return self._trimmed(text[:keep]), ""
        thought = self._trimmed(thought).rstrip()
        self._thinking, self._bare = False, True
        return thought, self._trimmed(content)

    def rest(self) -> tuple[str, str]:
        """What was held back, at the end of an answer."""
        pending, self._held = self._held, ""
        return (self._trimmed(pending).rstrip(), "") if self._thinking else ("", pending)

    def _trimmed(self, text: str) -> str:
        if self._bare:
            text = text.lstrip()
            self._bare = not text
        return text


def _unsure(text: str, close: str) -> int:
    """From where on a text could be the end of thoughts: space, or a beginning of their closing tag."""
    end_lengths = (n for n in range(len(close) - 1, 0, -1) if text.endswith(close[:n]))
    return len(text[: len(text) - next(end_lengths, 0)].rstrip())


def split(text: str, thinking: bool, marks: tuple[str, str] = MARKS) -> tuple[str, str]:
    """Thoughts and content of a whole answer."""
    thoughts = Thoughts(thinking, marks)
    parts = thoughts.add(text), thoughts.rest()
    return parts[0][0] + parts[1][0], parts[0][1] + parts[1][1]
