"""Names of other tools' options: taken where they mean the same, else answered by packtrain's option."""

import re
from dataclasses import fields

import pytest

from packtrain.cli import main as cli
from packtrain.cli.main import main
from packtrain.common.errors import InputError
from packtrain.common.familiar_names import ADVICE, ALIASES, COMMAND_NAMES, TRAINING_OPTION
from packtrain.common.options import from_values, option_fields, read_yaml
from packtrain.training.finetune_settings import TuneSettings
from packtrain.training.train_settings import TrainSettings

COMMANDS = {"train": TrainSettings, "finetune": TuneSettings}


def option_names(command: str) -> dict[str, str]:
    """Every option of a command, by its flags, with its setting."""
    parser = cli._build_parser([command])._subparsers._group_actions[0].choices[command]
    return {name: action.dest for name, action in parser._option_string_actions.items()}


def parse(command: str, *words: str):
    return cli._build_parser([command]).parse_args([command, *words])


def value_of(command: str, setting: str) -> list[str]:
    """What stands after a flag: nothing after one that is on or off."""
    is_switch = COMMANDS[command].__dataclass_fields__[setting].type in (bool, "bool")
    return [] if is_switch else ["7"]


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_sets_the_option_it_means(alias, tmp_path):
    settings_file, commands = tmp_path / "run.yaml", 0
    for command, settings in COMMANDS.items():
        names = option_names(command)
        if ALIASES[alias] not in names:
            continue
        commands += 1
        setting = names[ALIASES[alias]]
        value = value_of(command, setting)
        underscored = alias.replace("-", "_")
        for word in (f"--{alias}", f"--{underscored}", f"-{alias}"):
            parsed = getattr(parse(command, word, *value), setting)
            assert parsed in ((True,) if not value else ("7", ["7"])), word
        if not value:
            assert getattr(parse(command, f"--no-{alias}"), setting) is False
        for key in (alias, underscored):
            settings_file.write_text(f"{key}: 7")
            assert read_yaml(settings, settings_file) == {setting: 7}, key
    assert commands, "no command has this option"


@pytest.mark.parametrize("name", ADVICE)
def test_a_name_with_another_meaning_is_answered_by_options_that_exist(name, tmp_path, capsys):
    for command, settings in COMMANDS.items():
        words = [f"-{name}" if len(name) == 1 else f"--{name.replace('-', '_')}", "7"]
        with pytest.raises(SystemExit) as error:
            main([command, *words])
        message = capsys.readouterr().err
        assert error.value.code == 2 and f"no option {words[0]}; {ADVICE[name]}; see" in message
        if name in {field.name for field in fields(settings)}:
            continue  # a YAML file names the model so
        path = tmp_path / "run.yaml"
        path.write_text(f"{name.replace('-', '_')}: 7")
        with pytest.raises(InputError, match=re.escape(f"; {ADVICE[name]}")):
            read_yaml(settings, path)
    options = set().union(*map(option_names, COMMANDS))
    assert set(re.findall(r"--[a-z][a-z-]+", ADVICE[name])) <= options


def test_no_name_is_in_both_tables_or_an_option_already():
    assert not ALIASES.keys() & ADVICE.keys()
    for command in COMMANDS:
        names = option_names(command)
        assert TRAINING_OPTION in names
        assert not {f"--{name}" for name in (*ALIASES, *ADVICE)} & names.keys()


def test_an_option_with_one_dash_is_never_another_option_or_its_value(capsys, tmp_path):
    assert parse("finetune", "-opt", "sgd").optimizer == "sgd"
    assert parse("finetune", "-opt=sgd").optimizer == "sgd"
    assert not hasattr(parse("finetune", "-opt=sgd"), "output")
    assert parse("finetune", "-epochs", "2", "-t4", "-lr", "1e-3", "-o=x.gguf").threads == "4"
    for words, sentence in (
        (["finetune", "-otuned.gguf"], "there is no option -otuned.gguf"),
        (["generate", "m.gguf", "-prompd"], "there is no option -prompd; did you mean --prompt?"),
        (["finetune", "-bs", "4"], "there is no option -bs"),
        (["finetune", "m.gguf", "-n", "50"], "there is no option -n; see"),  # not -ngl
        (["train", "-l", "1e-3"], "there is no option -l; see"),  # not -lr
        (["generate", "-m", "m.gguf"], "there is no option -m; MODEL, a GGUF file, is the first"),
        (["chat", "-hf", "owner/name"], "there is no option -hf; packtrain downloads nothing"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert sentence in capsys.readouterr().err


def test_every_option_may_be_written_with_underscores():
    for command, settings in COMMANDS.items():
        for field in option_fields(settings):
            if not field.metadata.get("positional"):
                value = value_of(command, field.name)
                word = f"--{field.name}"
                is_switch = isinstance(field.default, bool) or "bool" in str(field.type)
                assert hasattr(parse(command, word, *([] if is_switch else value)), field.name)


def test_other_commands_know_no_names_of_training(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "m.gguf", "--max-length", "100"])
    assert "there is no option --max-length; see" in capsys.readouterr().err


def test_keywords_may_have_names_of_other_tools():
    settings = from_values(
        TuneSettings, {"learning_rate": 1e-3, "max_steps": 7, "lora_r": "4"}, None
    )
    assert (settings.lr, settings.iters, settings.lora_rank) == (1e-3, 7, ("4",))
    for name, sentence in (
        ("target_modules", "no setting target_modules; --lora-modules takes GGUF's names"),
        ("itres", "there is no setting itres; did you mean iters?"),
    ):
        with pytest.raises(InputError, match=re.escape(sentence)):
            from_values(TuneSettings, {name: 7}, None)
    with pytest.raises(InputError, match=r"^lr and learning_rate are one setting; leave one"):
        from_values(TuneSettings, {"lr": 1e-3, "learning_rate": 1e-3}, None)


def test_commands_of_other_tools_are_answered_by_commands():
    assert set(COMMAND_NAMES.values()) <= cli.COMMANDS.keys()
    assert not COMMAND_NAMES.keys() & cli.COMMANDS.keys()


def test_a_setting_stands_once_in_a_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("lr: 1e-3\nlearning_rate: 1e-4\nlora-rank: 4")
    with pytest.raises(InputError, match=r"run.yaml: lr and learning_rate are one setting; leave"):
        read_yaml(TuneSettings, path)
    path.write_text("lr: 1e-3\niters: 2\nlr: 1e-4\n")
    with pytest.raises(InputError, match=r"run.yaml: lr is there twice; leave one of them out"):
        read_yaml(TuneSettings, path)
