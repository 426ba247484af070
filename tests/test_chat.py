"""The chat command: what the model is given in each turn, what goes through it again, and how a conversation ends."""

import io
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from packtrain.cli import chat, event_output
from packtrain.cli.event_output import TerminalEvents, write
from packtrain.cli.main import main
from packtrain.common.errors import InputError
from packtrain.data.chat_template import TemplateError
from packtrain.gguf import MetadataValue
from packtrain.models.model_file import open_model
from packtrain.workflows.chat_session import ChatSession, ChatSettings
from tests.test_model_file import CONFIG, save

Capture = pytest.CaptureFixture[str]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('not that') }}{% endif %}"
    "{{ m.role[0] }} {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a {% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat") / "m.gguf"
    template = {"tokenizer.chat_template": MetadataValue("string", TEMPLATE)}
    save(path, replace(CONFIG, context_length=128), extra=template)
    return path


def settings(model: Path, **options: object) -> ChatSettings:
    return ChatSettings(model, temp=0.0, n_predict=5, **options)  # type: ignore[arg-type]


def run_chat(
    chat_settings: ChatSettings, lines: str, monkeypatch: pytest.MonkeyPatch, terminal: bool = False
) -> int:
    typed = io.StringIO(lines)
    monkeypatch.setattr(typed, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stdin", typed)
    return chat.run(chat_settings)


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What each answer was made from: its text, and how many of its tokens went through the model."""
    seen: list[tuple[str, int]] = []
    before = ChatSession.reply

    def record_prompt(self: ChatSession, prompt_text: str) -> object:
        ids = self._prompt_ids(prompt_text)
        cached = list(self._generator.cached_tokens)
        num_shared = next(
            (i for i, (a, b) in enumerate(zip(cached, ids, strict=False)) if a != b), len(cached)
        )
        seen.append(
            (self.tokenizer.decode(ids, special=True), len(ids) - min(num_shared, len(ids) - 1))
        )
        return before(self, prompt_text)

    monkeypatch.setattr(ChatSession, "reply", record_prompt)
    return seen


def test_a_conversation(
    model: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, prompts: list[tuple[str, int]]
) -> None:
    assert run_chat(settings(model, system="be good"), "the cat\n\n a dog \n", monkeypatch) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert [text for text, _ in prompts] == [
        "<s>s be good\nu the cat\na ",
        f"<s>s be good\nu the cat\na {first.strip()}\nu a dog\na ",
    ]
    # the second time only the new message is fed, and the one token of the answer that the model has not seen
    assert prompts[1][1] < 20 < len(open_model(model).tokenizer().encode(prompts[1][0]))
    assert len(second) > 0


def test_answers_are_those_of_a_fresh_model(
    model: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_chat(settings(model), "a b\nc d\n", monkeypatch)
    second = capsys.readouterr().out.splitlines()[1]
    talk = ChatSession(settings(model), TerminalEvents())
    run_chat(settings(model), "a b\n", monkeypatch)
    talk.messages += [{"role": "user", "content": "a b"}]
    talk.messages += [{"role": "assistant", "content": capsys.readouterr().out.strip()}]
    talk.answer("c d")
    assert capsys.readouterr().out.splitlines() == [second]


def test_commands(
    model: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, prompts: list[tuple[str, int]]
) -> None:
    lines = "/regen\nabc\n/regen\n/clear\nd\n/what is it\n/help\n/exit\nnever\n"
    assert run_chat(replace(settings(model, seed=3), temp=5.0), lines, monkeypatch) == 0
    out, said = capsys.readouterr()
    assert [text for text, _ in prompts] == ["<s>u abc\na ", "<s>u abc\na ", "<s>u d\na "]
    first, second, _ = out.splitlines()
    assert first != second
    assert "no message to answer" in said and "/what is not a command" in said
    assert "/regen  generate another answer" in said


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye"])
def test_the_words_of_other_chats_quit(
    word: str, model: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_chat(settings(model), f"{word}\nnever\n", monkeypatch) == 0
    assert not capsys.readouterr().out


def test_a_full_context_is_said_and_can_be_cleared(
    model: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "a b c d e f g h"
    chat_settings = replace(settings(model, ctx=24), n_predict=-1)
    assert run_chat(chat_settings, f"a\n{long}\n/clear\n{long}\n", monkeypatch, terminal=True) == 0
    said = capsys.readouterr().err
    assert said.count("the context of 24 tokens is full") == 2
    assert (
        "tokens and the context 24; start a new one, or make room for more (--ctx); /clear" in said
    )
    with pytest.raises(InputError, match="and the context 24; start a new one"):
        run_chat(chat_settings, f"a\n{long}\n", monkeypatch)


def test_a_message_that_the_template_refuses_is_left_out(
    model: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, prompts: list[tuple[str, int]]
) -> None:
    assert run_chat(settings(model), "no\nyes\n", monkeypatch, terminal=True) == 0
    assert "the chat template: not that" in capsys.readouterr().err
    assert [text for text, _ in prompts] == ["<s>u yes\na "]
    with pytest.raises(TemplateError, match="not that"):
        run_chat(settings(model), "no\nyes\n", monkeypatch)


def test_without_a_template_chatml_is_used_and_said(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, prompts: list[tuple[str, int]]
) -> None:
    save(tmp_path / "m.gguf", replace(CONFIG, context_length=256))
    assert run_chat(settings(tmp_path / "m.gguf"), "hi\n", monkeypatch) == 0
    assert "chat template: chatml, since the model has none" in capsys.readouterr().err
    words = prompts[0][0].replace("</s> ", "</s>")  # a vocabulary may begin words with a space
    assert words == "<s><|im_start|>user\nhi</s>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_ctrl_c_ends_an_answer(
    model: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    before, write_out, written = signal.getsignal(signal.SIGINT), event_output.write, list[str]()

    def then_stop(text: str) -> None:
        write_out(text)
        written.append(text)
        if text.strip() and not "".join(written[:-1]).strip():  # the first there is
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(event_output, "write", then_stop)
    chat_settings = replace(settings(model), n_predict=60)
    # on a terminal the conversation goes on; in a script nobody is there to go on
    assert run_chat(chat_settings, "a\nb\n", monkeypatch, terminal) == (0 if terminal else 130)
    assert (len("".join(written)) > 30) == terminal  # only the first answer is cut
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_leaves(
    model: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt_twice(text: str) -> None:
        if text.strip():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(event_output, "write", interrupt_twice)
    assert (
        run_chat(replace(settings(model), n_predict=60), "a\nb\n", monkeypatch, terminal=True)
        == 130
    )


def test_ctrl_c_at_the_prompt_leaves(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ctrl_c(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", ctrl_c)
    assert run_chat(settings(model), "", monkeypatch, terminal=True) == 130


def test_text_that_is_none(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    with pytest.raises(InputError, match="standard input is not UTF-8"):
        chat.run(settings(model))


def test_text_that_is_none_in_a_lenient_locale(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Where the locale is C.UTF-8, Python reads such bytes as halves of surrogate pairs."""
    typed = io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8", "surrogateescape")
    monkeypatch.setattr("sys.stdin", typed)
    assert main(["chat", str(model)]) == 2
    assert "standard input is not UTF-8" in capsys.readouterr().err


def test_a_terminal_gets_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A token of a file that nobody has checked may hold an escape sequence; a pipe gets what the model wrote."""
    text = "a\tb\n\x1b[31m\x07\x9bc\r"
    write(text)
    assert capsys.readouterr().out == text
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    write(text)
    assert capsys.readouterr().out == "a\tb\n\ufffd[31m\ufffd\ufffdc\ufffd"
