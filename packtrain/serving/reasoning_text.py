"""Separation of a model's thoughts from its answer (llama-server: --reasoning-format deepseek)."""

THINK_OPEN, CLOSE = "<think>", "</think>"
AUTO, NONE, DEEPSEEK = "auto", "none", "deepseek"
FORMATS = (AUTO, NONE, DEEPSEEK)
MARKS = THINK_OPEN, CLOSE


def thinking_marks(template: str, template_marks: tuple[str, str]) -> tuple[str, str] | None:
    """Return the texts around thoughts: <think> and </think> if in `template`, else `template_marks`; None if empty."""
    open_mark, closed = template_marks[0].strip(), template_marks[1].strip()
    return MARKS if CLOSE in template else (open_mark, closed) if open_mark and closed else None


def is_thinking(prompt: str, partial_answer: str | None, marks: tuple[str, str] = MARKS) -> bool:
    """Return whether an answer begins within thoughts: its partial text has an opening mark (marks[0]) that is not
    closed, or without partial text the prompt ends with one."""
    if partial_answer is not None:
        return partial_answer.rfind(marks[0]) > partial_answer.rfind(marks[1])
    return prompt.rstrip().endswith(marks[0])


class ReasoningSplitter:
    """Splits an answer into thoughts and content, piece by piece. Space around thoughts belongs to neither.

    thinking  the answer begins within thoughts: its prompt has opened them
    marks     texts before and behind thoughts
    """

    def __init__(self, thinking: bool, marks: tuple[str, str] = MARKS) -> None:
        self._open_mark, self._close_mark = marks
        self._is_thinking, self._has_started, self._pending_text = thinking, thinking, ""
        self._trims_space = thinking  # whether space before the next text is dropped

    def add_piece(self, piece: str) -> tuple[str, str]:
        """Add a piece of the answer; returns (thoughts, content) that are certain now; "" for none."""
        text = self._pending_text + piece
        self._pending_text = ""
        if not self._has_started:
            words = text.lstrip()
            if len(words) < len(self._open_mark) and self._open_mark.startswith(words):
                self._pending_text = text
                return "", ""
            self._has_started, self._is_thinking = True, words.startswith(self._open_mark)
            if self._is_thinking:
                text, self._trims_space = words.removeprefix(self._open_mark), True
        if not self._is_thinking:
            return "", self._trim_start(text)
        thought, close_mark, content = text.partition(self._close_mark)
        if not close_mark:
            # the end of thoughts may have begun: with space, or a prefix of the closing mark
            lengths = range(len(self._close_mark) - 1, 0, -1)
            mark_length = next((n for n in lengths if text.endswith(self._close_mark[:n])), 0)
            certain_length = len(text[: len(text) - mark_length].rstrip())
            self._pending_text = text[certain_length:]
            return self._trim_start(text[:certain_length]), ""
        thought = self._trim_start(thought).rstrip()
        self._is_thinking, self._trims_space = False, True
        return thought, self._trim_start(content)

    def flush(self) -> tuple[str, str]:
        """Return (thoughts, content) that add_piece held back; call this at the end of an answer."""
        pending, self._pending_text = self._pending_text, ""
        return (self._trim_start(pending).rstrip(), "") if self._is_thinking else ("", pending)

    def _trim_start(self, text: str) -> str:
        if self._trims_space:
            text = text.lstrip()
            self._trims_space = not text
        return text


def split_reasoning(text: str, thinking: bool, marks: tuple[str, str] = MARKS) -> tuple[str, str]:
    """Split an answer, begun within thoughts if `thinking`, into thoughts and content; marks: texts around thoughts."""
    splitter = ReasoningSplitter(thinking, marks)
    split_parts = splitter.add_piece(text), splitter.flush()
    return split_parts[0][0] + split_parts[1][0], split_parts[0][1] + split_parts[1][1]
