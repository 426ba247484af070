"""packtrain compare: right answers, wins, losses as eval has them, what was forgotten, the page."""

import json
import random
import re
import sys
from pathlib import Path

import pytest

import packtrain as pt
from packtrain.cli.compare import html_page
from packtrain.cli.main import main
from packtrain.common.errors import InputError
from packtrain.training.model_loss import MeanEstimate
from packtrain.training.monitoring.runs_page import live_page
from packtrain.workflows import judge_command
from packtrain.workflows.comparison import (
    FINAL,
    LONGER,
    MATCH,
    SHORTER,
    ComparedModel,
    CompareSettings,
    ComparisonResult,
    Question,
    _win_signs,
    final_answer,
)
from packtrain.workflows.judge_command import judge_answers, parse_command
from tests.architectures import random_model
from tests.browser import chromium
from tests.kill import sample_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A base of random weights, and one that has learned to say yes and no."""
    directory = tmp_path_factory.mktemp("compare")
    random_model(directory / "base.gguf", "llama tied")
    rng = random.Random(0)
    lines = []
    for _ in range(48):
        is_yes = rng.random() < 0.5
        prompt = "is it so" if is_yes else "what else"
        lines.append({"prompt": prompt, "completion": "a #### yes" if is_yes else "b #### no"})
    (directory / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (directory / "test.jsonl").write_text("\n".join(map(json.dumps, lines[:6])))
    (directory / "text.txt").write_text(sample_text(1500))
    training_flags = [
        "--full",
        "--lr",
        "0.003",
        "--epochs",
        "8",
        "--val-split",
        "0",
        "--no-tensorboard",
    ]
    args = [
        str(directory / "base.gguf"),
        "--data",
        str(directory / "train.jsonl"),
        "--batch-size",
        "2",
    ]
    assert main(["finetune", *args, "-o", str(directory / "tuned.gguf"), *training_flags]) == 0
    return directory


def models(folder: Path) -> list[str]:
    return [str(folder / "base.gguf"), str(folder / "tuned.gguf")]


@pytest.mark.parametrize(
    "answer, final",
    [
        ("3 + 4 = 7\n#### 7", "7"),
        ("#### 1,000.", "1000"),
        ("#### 5\nno, wait\n#### $6 ", "6"),
        ("Oslo.", "oslo"),
        ("The  answer", "theanswer"),
        ("", ""),
    ],
)
def test_final_answers(answer: str, final: str) -> None:
    assert final_answer(re.compile(FINAL), answer) == final


def test_a_pattern_without_a_group_is_taken_whole() -> None:
    assert final_answer(re.compile(r"\d+"), "from 3 to 14") == "14"


@pytest.mark.parametrize(
    "rule, sides", [(MATCH, [1, -1, 0, 0]), (SHORTER, [1, 0, -1, 0]), (LONGER, [-1, 0, 1, 0])]
)
def test_wins(rule: str, sides: list[int]) -> None:
    subject = ComparedModel(
        "base", None, ["long one", "same", "short", "x"], [False, True, True, False], 0, 0, None
    )
    outcomes = _win_signs(
        rule, subject, ["short", "same", "long one", "y"], [True, False, True, False]
    )
    assert outcomes == sides


def test_the_tuned_model_answers_right_and_its_loss_is_that_of_eval(folder, capsys):
    data = str(folder / "test.jsonl")
    flags = ["--text", str(folder / "text.txt"), "-n", "24", "--html", str(folder / "page.html")]
    assert main(["compare", *models(folder), "--data", data, *flags]) == 0
    head, base, tuned, *examples = capsys.readouterr().out.splitlines()
    assert [*re.split(r"  +", head)][-1] == "perplexity of text.txt"
    assert "0 of 6 (0%)" in base and "6 of 6 (100%)" in tuned and "6 won, 0 lost, 0 even" in tuned
    for path, line in zip(models(folder), (base, tuned), strict=True):
        assert str(pt.evaluate(path, data).loss()) in line
        assert str(pt.evaluate(path, folder / "text.txt").loss().exponential) in line
    assert sum(line.startswith("----") for line in examples) == 3
    assert any(line.startswith("   + ") and "tuned.gguf: " in line for line in examples)
    text = (folder / "page.html").read_text()
    assert text.count('class="right"') == 6 and text.count('class="wrong"') == 6


def test_the_divergence_from_the_first_model_is_that_of_eval(folder, tmp_path, capsys):
    data, figures = str(folder / "test.jsonl"), tmp_path / "figures.json"
    flags = ["--data", data, "--count", "1", "-n", "2", "--show", "0", "--json", str(figures)]
    assert main(["compare", *models(folder), *flags, "--kl"]) == 0
    head, _, tuned = capsys.readouterr().out.splitlines()
    divergence = pt.evaluate(folder / "tuned.gguf", data, kl_base=folder / "base.gguf").mean_kl()
    assert divergence.value > 0.01 and divergence.text(6) in tuned and "KL from the first" in head
    shown = [model["kl"] for model in json.loads(figures.read_text())["models"]]
    assert [kl["value"] for kl in shown] == [0.0, divergence.value]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}))
    with pytest.raises(InputError, match=r"kl needs conversations; .* has pairs of answers"):
        pt.compare(models(folder), pairs, kl=True)


def test_pairs_are_compared_by_their_answers_alone(folder, tmp_path):
    data = tmp_path / "pairs.jsonl"
    pair = {"prompt": "is it so", "chosen": "a #### yes", "rejected": "c"}
    data.write_text(json.dumps(pair))
    comparison = pt.compare(models(folder), data, n_predict=24, rule="shorter")
    assert [subject.loss for subject in comparison.subjects] == [None, None]
    assert comparison.subjects[1].right == [True] and comparison.questions[0].answer == "a #### yes"


def test_the_page_shows_what_models_write_as_text() -> None:
    script_text = "<script>alert(1)</script>"
    styled = ComparedModel("a", None, [script_text], [False], 0, 0, None, [True], [0.5])
    assert ">in style, score 0.5<" in html_page(
        CompareSettings((Path("a"),), Path("b"), has="x"),
        ComparisonResult(
            [Question([{"role": "user", "content": script_text}], script_text)], [styled], True
        ),
    )
    subject = ComparedModel(script_text, MeanEstimate(1.0, 0.1), [script_text], [True], 0, 0, None)
    comparison = ComparisonResult(
        [Question([{"role": "user", "content": script_text}], script_text)],
        [subject, subject],
        True,
    )
    text = html_page(CompareSettings((Path("a"), Path("b")), Path(script_text)), comparison)
    assert "<script" not in text and text.count("&lt;script&gt;") >= 6


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width, is_wide", [(1120, True), (390, False)])
def test_answers_stand_side_by_side_and_on_a_phone_below_each_other(
    width: int, is_wide: bool, scheme: str
) -> None:
    long_text = "word " * 60 + "x" * 300
    subjects = [
        ComparedModel(
            f"models/{name}.gguf",
            MeanEstimate(1.0, 0.1),
            [long_text, ""],
            [True, False],
            0,
            0,
            None,
        )
        for name in ("base", "tuned")
    ]
    questions = [Question([{"role": "user", "content": long_text}], long_text)] * 2
    text = html_page(
        CompareSettings((Path("a"), Path("b")), Path("c")),
        ComparisonResult(questions, subjects, True),
    )
    with chromium() as browser:
        opened = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        opened.set_content(text)
        data, base, tuned = (
            part.bounding_box() for part in opened.locator(".answers").first.locator("> div").all()
        )
        assert (base["y"] == tuned["y"] == data["y"]) == is_wide
        assert (base["x"] == tuned["x"]) != is_wide and abs(base["width"] - tuned["width"]) < 1
        assert opened.evaluate("document.documentElement.scrollWidth") <= width
        heads = opened.locator("article h3").all_inner_texts()
        assert heads[1:4] == ["the answer in the data", "base.gguf · right", "tuned.gguf · right"]
        (shades,) = re.findall(r"--page: (#\w+)", live_page()[0])[scheme == "dark" :][:1]
        rgb = ", ".join(str(int(shades[k : k + 2], 16)) for k in (1, 3, 5))
        assert opened.evaluate("getComputedStyle(document.body).backgroundColor") == f"rgb({rgb})"


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--pattern", "("], "--pattern (: "),
        (["--has", "("], "--has (: "),
        (
            ["--judge", "no-such-judge --fast"],
            "--judge no-such-judge --fast: there is no such command",
        ),
        (["--judge", "a 'b"], "--judge a 'b: No closing quotation"),
        (["--temp", "-1"], "--temp"),
        (["--json", "/nowhere/a.json"], "--json"),
        (["--rule", "best"], "--rule"),
        (["--html", "/nowhere/page.html"], "--html"),
        (["--count", "0"], "--count"),
    ],
)
def test_bad_settings(folder, capsys, flags, message):
    code = None
    try:
        code = main(["compare", *models(folder), "--data", str(folder / "test.jsonl"), *flags])
    except SystemExit as end:
        code = end.code
    assert code == 2 and message in capsys.readouterr().err


def test_one_model_or_data_without_answers_is_refused(folder, tmp_path):
    with pytest.raises(InputError, match="name at least two"):
        pt.compare([models(folder)[0]], folder / "test.jsonl")
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "only a text"}))
    with pytest.raises(InputError, match="line 1 is a text"):
        pt.compare(models(folder), text)


def test_questions_too_long_for_the_context_are_left_out(folder, tmp_path, capsys):
    short_record, long_record = (
        {"prompt": "is it so" * n, "completion": "a #### yes"} for n in (1, 400)
    )
    data = tmp_path / "mixed.jsonl"
    data.write_text("\n".join(map(json.dumps, [short_record, long_record])))
    assert main(["compare", *models(folder), "--data", str(data), "-n", "8"]) == 0
    said = capsys.readouterr()
    assert "1 conversation of 2 left out: no room for an answer" in said.err
    assert re.search(r"of 1 \(", said.out)
    data.write_text(json.dumps({"prompt": long_record["prompt"], "chosen": "a", "rejected": "b"}))
    with pytest.raises(InputError, match=r"no conversation of .* leaves room"):
        pt.compare(models(folder), data, n_predict=8)


def test_answers_in_a_style_are_counted_and_scored_by_a_command(folder, tmp_path, capsys):
    judge = tmp_path / "judge.py"
    judge.write_text(
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    row = json.loads(line)\n"
        "    assert set(row) == {'question', 'reference', 'answer', 'model'}\n"
        "    print(2.5 if row['reference'] == row['answer'] else 'false')\n"
    )
    flags = ["-n", "24", "--has", "#### (yes|no)$", "--judge", f"{sys.executable} '{judge}'"]
    files = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    args = [*models(folder), "--data", str(folder / "test.jsonl"), *flags, *files]
    assert main(["compare", *args, "--pattern", "@@"]) == 0
    said = capsys.readouterr()
    head, base, tuned, *_ = said.out.splitlines()
    assert re.split(r"  +", head)[3:5] == ["has style", "judged"]
    assert re.split(r"  +", base)[3:5] == ["0 of 6 (0%)", "0.000"]
    assert re.split(r"  +", tuned)[3:5] == ["6 of 6 (100%)", "2.500"]
    assert "--pattern @@ matches no answer of the data" in said.err and "--has REGEX" in said.err
    of_base, of_tuned = json.loads((tmp_path / "a.json").read_text())["models"]
    assert (of_base["share_has"], of_tuned["share_has"], of_tuned["mean_score"]) == (0, 1, 2.5)
    page = (tmp_path / "a.html").read_text()
    assert '6 of 6 (100%)</td><td data-name="judged">2.500</td>' in page
    assert main(["compare", *args[:4]]) == 0
    assert "--pattern" not in capsys.readouterr().err  # the default matches answers of this data


@pytest.mark.parametrize(
    "code, message",
    [
        ("print(1)", "printed 1 line for 2 answers; it must print one score for each"),
        ("print('1\\ngood')", "line 2 of its output is 'good'; a score is a number, true or false"),
        ("print('nan\\n1')", "line 1 of its output is 'nan'"),
        ("raise SystemExit('no model')", "failed with exit code 1: no model"),
    ],
)
def test_a_judge_that_prints_no_scores_is_named(code, message):
    command = parse_command(f'{sys.executable} -c "{code}"')
    with pytest.raises(InputError) as refusal:
        judge_answers(command, [{"answer": "a"}, {"answer": "b"}])
    assert message in str(refusal.value) and str(refusal.value).startswith("--judge ")


def test_a_judge_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(judge_command, "SECONDS_PER_ANSWER", 0.01)
    with pytest.raises(InputError, match="has not ended after"):
        judge_answers(["sleep", "600"], [{"answer": "a"}])


def test_scores_are_numbers_or_truths():
    command = parse_command(f"{sys.executable} -c \"print('True\\nfalse\\n -0.5 ')\"")
    assert judge_answers(command, [{"answer": "a"}] * 2 + [{"answer": "\ud800"}]) == [
        1.0,
        0.0,
        -0.5,
    ]


def test_a_temperature_makes_other_answers_and_the_same_ones_again(folder):
    options = {"n_predict": 12, "count": 2}
    first_answers, second_answers, likeliest = (
        pt.compare(models(folder), folder / "test.jsonl", temp=temp, **options).subjects[0].answers
        for temp in (1.5, 1.5, 0.0)
    )
    assert first_answers == second_answers != likeliest
