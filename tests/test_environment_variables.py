"""Flags as environment variables: below the command line, above the YAML file and the defaults."""

import json
from pathlib import Path

import pytest

from packtrain.cli import main as cli
from packtrain.cli.compile import CompileSettings
from packtrain.cli.main import COMMANDS, main
from packtrain.common.options import add_variables, from_flags, option_fields, read_yaml, variables
from packtrain.training.run_settings import RunSettings
from packtrain.training.train_settings import TrainSettings
from tests.test_command_line import run_main


def settings_of(*words: str, command: str = "finetune") -> RunSettings:
    options = cli._build_parser([command]).parse_args([command, *words])
    settings_class = cli.settings_class_of(command)
    add_variables(options, settings_class)
    return from_flags(settings_class, options)


def test_every_flag_has_a_variable():
    for command in COMMANDS:
        settings = cli.settings_class_of(command)
        flags = [f.name for f in option_fields(settings) if not f.metadata.get("positional")]
        assert list(variables(settings)) == [f"PACKTRAIN_{name.upper()}" for name in flags]
        shared_names = cli.OTHER_VARIABLES & variables(settings).keys()
        assert shared_names == ({"PACKTRAIN_CPU"} if settings is CompileSettings else set())


def test_flags_win_over_variables_which_win_over_yaml_which_wins_over_defaults(
    monkeypatch, tmp_path
):
    path = tmp_path / "run.yaml"
    path.write_text("model: m.gguf\nseed: 3\nctx: 64\nbatch_size: 2\nlora_rank: [3]")
    for name, value in {
        "CONFIG": str(path),
        "SEED": "4",
        "CTX": "128",
        "LORA_RANK": "[4, attn_q=8]",
        "PACK": "off",
        "FULL": "0",
        "TENSORBOARD": "True",
        "FREEZE": "blk.0.*",
        "MEMORY": "",
    }.items():
        monkeypatch.setenv(f"PACKTRAIN_{name}", value)
    settings = settings_of("--seed", "5")
    assert (settings.seed, settings.ctx, settings.batch_size, settings.epochs) == (5, 128, 2, None)
    assert settings.lora_rank == ("4", "attn_q=8") and settings.freeze == ("blk.0.*",)
    assert (settings.pack, settings.full, settings.tensorboard) == (False, False, True)
    assert settings.memory is None, "an empty variable counts as unset"


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("LR", "fast", "PACKTRAIN_LR is 'fast'; it must be a number"),
        ("TENSORBOARD", "maybe", "PACKTRAIN_TENSORBOARD is 'maybe'; it must be true or false"),
        ("OPTIMIZER", "sdg", "PACKTRAIN_OPTIMIZER is sdg; it must be one of adamw, sgd"),
        ("MEMORY", "1KiB", "PACKTRAIN_MEMORY: 1KiB is too little; it must be from 1MiB"),
        ("NESTEROV", "1", "PACKTRAIN_NESTEROV has no effect "),
        ("CONFIG", "no.yaml", "--config: no.yaml cannot be read"),
        ("CTX", "1", "PACKTRAIN_CTX is 1; it must be from 2 to"),
    ],
)
def test_a_bad_value_names_its_variable(name, value, sentence, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("a text\n" * 99)
    monkeypatch.setenv(f"PACKTRAIN_{name}", value)
    code, lines = run_main(["train", "--data", "notes.txt"], capsys)
    assert code == 2 and f"packtrain: error: {sentence}" in lines[-1], lines


def test_the_flag_is_named_where_the_flag_is_wrong(monkeypatch, capsys):
    monkeypatch.setenv("PACKTRAIN_LR", "fast")
    code, lines = run_main(["train", "--lr", "slow"], capsys)
    assert code == 2 and lines == ["packtrain: error: --lr is 'slow'; it must be a number"]


def test_a_variable_that_no_command_reads_is_named_once(monkeypatch, capsys, tmp_path):
    path = str(tmp_path / "m.gguf")
    for name in ("MEMROY", "LORA_RANK", "XYZZY", "CPU"):
        monkeypatch.setenv(f"PACKTRAIN_{name}", "")
    lines = run_main(["inspect", path], capsys)[1]
    assert lines[:-1] == [
        "PACKTRAIN_MEMROY is set, but no command reads it; did you mean PACKTRAIN_MEMORY?",
        "PACKTRAIN_XYZZY is set, but no command reads it",
    ]
    monkeypatch.setenv("PACKTRAIN_PARENT", "1")  # a rank, whose launcher has named them
    assert len(run_main(["inspect", path], capsys)[1]) == 1


def test_a_run_writes_down_what_was_effective(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("one two three four\n" * 200)
    values = {"DATA": "notes.txt", "ITERS": "1", "DIM": "32", "LAYERS": "1"}
    for name, value in values.items():
        monkeypatch.setenv(f"PACKTRAIN_{name}", value)
    words = ["--heads", "2", "--kv-heads", "2", "--ffn", "32", "--ctx", "16", "--vocab-size", "280"]
    assert main(["train", *words]) == 0
    saved = read_yaml(TrainSettings, "model.run/run.yaml")
    assert (saved["iters"], saved["dim"], saved["heads"]) == (1, 32, 2)
    monkeypatch.setenv("PACKTRAIN_JSON", "plan.json")
    assert main(["plan", "train", *words]) == 0
    assert json.loads(Path("plan.json").read_text())
