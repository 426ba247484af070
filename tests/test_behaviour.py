"""After a tuning run: held-out questions answered by base and tuned model, what is said of them, and what is kept."""

import json
import os
import signal
from dataclasses import asdict, replace
from html import escape
from pathlib import Path

import pytest

import packtrain as pt
from packtrain.cli.event_output import MIN_WIDTH, TerminalEvents, side_by_side
from packtrain.cli.main import main
from packtrain.workflows import behaviour_check
from packtrain.workflows.behaviour_check import MAX_TOKENS, CheckedAnswer, answer_findings
from tests.architectures import random_model
from tests.kill import sample_chats, sample_text

COMMON_FLAGS = [
    "--batch-size",
    "2",
    "--lr",
    "0.01",
    "--val-split",
    "0.2",
    "--no-tensorboard",
    "--iters",
    "2",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("behaviour")
    (directory / "chats.jsonl").write_text(sample_chats())
    (directory / "text.txt").write_text(sample_text(3000))
    random_model(directory / "base.gguf", "llama tied")
    return directory


def run_finetune(folder: Path, output: Path, *extra_flags: str, data: str = "chats.jsonl") -> int:
    args = [
        str(folder / "base.gguf"),
        "--data",
        str(folder / data),
        "-o",
        str(output),
        *COMMON_FLAGS,
    ]
    return main(["finetune", *args, *extra_flags])


@pytest.mark.parametrize("merge", ["plain", "none"])
def test_held_out_questions_are_answered_shown_and_kept(folder, tmp_path, capsys, merge):
    assert run_finetune(folder, tmp_path / "a.gguf", "--merge", merge) == 0
    said = capsys.readouterr().err
    saved = json.loads((tmp_path / "a.run/answers.json").read_text())
    assert [answer["question"] for answer in saved] == [
        f"what is the {x}" for x in ("sun", "ice", "sea")
    ]
    assert [answer["reference"][:6] for answer in saved] == ["the su", "the ic", "the se"]
    assert {answer["tuned_ended"] for answer in saved} <= {"end", "loop", "count", "context"}
    assert [answer["tuned"] for answer in saved] != [answer["base"] for answer in saved]
    assert "held-out question 1 of 3: what is the sun\n  data: the su" in said
    # resumed when it is finished: the same answers again, or as many as are now asked for
    assert (
        main(["finetune", "-o", str(tmp_path / "a.gguf"), "--resume", "--check-answers", "2"]) == 0
    )
    assert json.loads((tmp_path / "a.run/answers.json").read_text()) == saved[:2]
    assert (
        main(["finetune", "-o", str(tmp_path / "a.gguf"), "--resume", "--check-answers", "0"]) == 0
    )
    assert not (tmp_path / "a.run/answers.json").exists()


def test_the_library_returns_the_answers(folder, tmp_path):
    options = {"batch_size": 2, "iters": 2, "val_split": 0.2, "tensorboard": False, "merge": "none"}
    options |= {"output": tmp_path / "a.gguf", "check_answers": 1}
    done = pt.finetune(folder / "base.gguf", folder / "chats.jsonl", **options)
    (answer,) = done.answers
    assert answer.question == "what is the sun" and answer.tuned and answer.base_ended
    path = done.folder / behaviour_check.ANSWERS_FILE
    hostile = [
        {**asdict(answer), "tuned": "<script>alert(1)</script> & more", "tuned_ended": "loop"}
    ]
    path.write_text(json.dumps(hostile))
    html = done._repr_html_()
    assert ">what is the sun</td>" in html and escape(answer.base) in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more (repeats itself, stopped)" in html
    assert "<script>" not in html
    path.unlink()
    assert "held-out question" not in done._repr_html_()


def test_running_text_and_prompts_that_are_trained_on_have_no_questions(folder, tmp_path, capsys):
    assert run_finetune(folder, tmp_path / "a.gguf", "--merge", "none", data="text.txt") == 0
    assert run_finetune(folder, tmp_path / "b.gguf", "--merge", "none", "--no-mask-prompt") == 0
    assert "held-out question" not in capsys.readouterr().err


def test_a_check_that_does_not_fit_the_budget_is_left_out(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("packtrain.inference.kv_cache.context_size.OVERHEAD_NBYTES", 1 << 40)
    flags = ["--merge", "none", "--memory", "2GiB", "--replay", "0"]
    assert run_finetune(folder, tmp_path / "a.gguf", *flags) == 0
    said = capsys.readouterr().err
    assert (
        "no held-out questions are answered: a context of" in said
        and (tmp_path / "a.gguf").exists()
    )


def test_ctrl_c_ends_the_check_and_not_the_result(folder, tmp_path, capsys, monkeypatch):
    replies = behaviour_check._generate_replies

    def stop_first(*args):
        os.kill(os.getpid(), signal.SIGINT)
        yield from replies(*args)

    monkeypatch.setattr(behaviour_check, "_generate_replies", stop_first)
    assert run_finetune(folder, tmp_path / "a.gguf", "--merge", "none") == 0
    assert (
        "stopped while answering held-out questions; the result is complete"
        in capsys.readouterr().err
    )
    assert (tmp_path / "a.gguf").exists() and not (tmp_path / "a.run/answers.json").exists()


ANSWER = CheckedAnswer("What now?", "This.", "base " * 60, "count", "tuned " * 60, "end", 3)


def test_answers_show_joined_emoji_and_spaces_and_no_control_characters() -> None:
    answer = replace(
        ANSWER, question="Qui\u00a0?", base="👨\u200d🔬 oui\u202f!", tuned="\x1b[2Jgone"
    )
    text = "\n".join(side_by_side([answer], 80))
    assert "👨\u200d🔬 oui\u202f!" in text and "\x1b" not in text and "\ufffd[2Jgone" in text


def test_columns_stand_beside_each_other_where_there_is_room() -> None:
    wide_lines = [*side_by_side([ANSWER], MIN_WIDTH)]
    assert (
        wide_lines[2].startswith("  base (no end, cut at 200 tokens)")
        and "│ tuned (ended by itself)" in wide_lines[2]
    )
    assert "base base" in wide_lines[3] and "tuned tuned" in wide_lines[3]
    narrow_lines = [*side_by_side([ANSWER], 60)]
    assert narrow_lines.index("  tuned (ended by itself)") > narrow_lines.index(
        "  base (no end, cut at 200 tokens)"
    )
    for lines, width in ((wide_lines, MIN_WIDTH), (narrow_lines, 60)):
        assert max(map(len, lines)) <= width
    escape = replace(ANSWER, tuned="\x1b[31mred", question="\x1b[2J")
    assert not any("\x1b" in line for line in side_by_side([escape], 60))


def test_answers_without_an_end_are_named_with_the_change_that_helps() -> None:
    loop, truncated = replace(ANSWER, tuned_ended="loop"), replace(ANSWER, tuned_ended="count")
    assert [*answer_findings([ANSWER])] == []
    (line,) = answer_findings([loop, truncated, ANSWER])
    assert line.startswith(
        "2 of 3 tuned answers, 1 of them repeating themselves, did not end: more --epochs"
    )
    assert [
        *answer_findings([replace(truncated, reference_tokens=MAX_TOKENS)])
    ] == []  # the data's is long, too
    (line,) = answer_findings([replace(ANSWER, tuned=ANSWER.base)])
    assert line.startswith("the tuned model answers as the base does")


def test_a_log_gets_one_column(capsys: pytest.CaptureFixture[str]) -> None:
    TerminalEvents().answers([ANSWER])
    assert "│" not in capsys.readouterr().err
