"""A flag is added by its field, where it acts and the reference: its rules stand in the field."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from packtrain.cli.main import COMMANDS, main, settings_class_of
from packtrain.common.option_rules import rules
from tests.copied import copy_package, edit_file, link_tests, packtrain_in, python_in

FIELD = """    decay_rows: int = TRAINING(
        0,
        "weight decay of the first N rows only",
        min_value=0,
        requires="weight_decay",
        conflicts={"optimizer=sgd|muon": "which decays all rows"},
    )
    decay_note: str = OUTPUT("", "what is printed at the beginning", requires="decay_rows")
"""
WHERE = "    result = train(settings, events)\n"
RESUME = """
import json
import re
from dataclasses import fields
from packtrain.training.resume_check import differences
from packtrain.training.train_settings import TrainSettings
about = lambda **values: {
    **{f.name: getattr(TrainSettings(**values), f.name) for f in fields(TrainSettings)},
    "data": "aa", "sources": {"data": "/x/a.txt"}, "steps": 9, "rows": 4,
}
saved, current = about(), about(decay_rows=3, decay_note="b")
print(json.dumps(differences(saved, current, TrainSettings)))
"""


def test_each_condition_of_a_rule_is_a_setting_or_property_of_a_command() -> None:
    """A misspelt one would never be checked."""
    names, conditions = {"has_validation"}, set[str]()  # known once the data is read
    for command in COMMANDS:
        settings_class = settings_class_of(command)
        names |= {field.name for field in fields(settings_class)} | {*dir(settings_class)}
        conditions |= {condition for _, condition, *_ in rules(settings_class)}
    assert {term.partition("=")[0] for words in conditions for term in words.split()} <= names


def test_a_help_that_begins_with_a_condition_is_a_rule() -> None:
    """Else the flag would have no effect, in silence, where its condition does not hold."""
    checked = 0
    for command in COMMANDS:
        settings_class = settings_class_of(command)
        required = {(name, of) for name, of, _, is_required in rules(settings_class) if is_required}
        for field in fields(settings_class):
            if condition := re.match(r"with --([a-z-]+): ", field.metadata["help"]):
                assert (field.name, condition[1].replace("-", "_")) in required, (command, field)
                checked += 1
    assert checked > 15


@pytest.mark.parametrize("command", ["quantize in.gguf out.gguf Q8_0", "merge in.gguf a.gguf -o m"])
@pytest.mark.parametrize("flags", ["--memory 2GiB", "--columns prompt=a"])
def test_what_only_data_needs_is_refused_without_data(command: str, flags: str, capsys) -> None:
    """Before any file is read."""
    assert main([*command.split(), *flags.split()]) == 2
    flag = flags.split()[0]
    sentence = f"{flag} has no effect without --calibrate; leave one of them out"
    assert capsys.readouterr().err == f"packtrain: error: {sentence}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of the package are edited; docs/reference.md is written."""
    folder = tmp_path_factory.mktemp("toy")
    home = copy_package(folder)
    optimizer = "    optimizer: str = UPDATE(\n"
    edit_file(home / "training/run_settings.py", (optimizer, FIELD + optimizer))
    edit_file(home / "cli/train.py", (WHERE, "    events.message(settings.decay_note)\n" + WHERE))
    link_tests(folder)
    (folder / "text.txt").write_text("abba c" * 99)
    return folder


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--decay-rows 3 --weight-decay 0", "--decay-rows has no effect without --weight-decay"),
        (
            "--decay-rows 3 --optimizer muon",
            "--decay-rows has no effect with --optimizer sgd or muon, which decays all rows",
        ),
        ("--decay-note b", "--decay-note has no effect without --decay-rows"),
        ("--decay-rows -1", "--decay-rows is -1; it must be 0 or more"),
    ],
)
def test_its_rules_refuse_it_in_one_line(folder: Path, flags: str, said: str) -> None:
    ran = packtrain_in(folder, f"train --data text.txt {flags}")
    assert ran.returncode == 2 and ran.stderr.splitlines()[-1].startswith(
        f"packtrain: error: {said}"
    )


def test_a_resumed_run_may_change_it_where_its_field_says_so(folder: Path) -> None:
    done = python_in(folder, "-c", RESUME)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["--decay-rows was 0 and is 3"]


def test_it_is_in_the_help_and_the_reference(folder: Path) -> None:
    assert "weight decay of the first N rows" in packtrain_in(folder, "train --help-all").stdout
    program = "from tests.reference import page\nimport json\nprint(json.dumps(page()))"
    done = python_in(folder, "-c", program)
    assert done.returncode == 0, done.stderr
    assert "`--decay-rows` | N | weight decay of the first N rows only" in done.stdout
