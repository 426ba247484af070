"""Completion of commands, options and values, in real shells where they are installed."""

import subprocess
from pathlib import Path

import pytest

from packtrain.cli.completion import bash_script, fish_script
from packtrain.cli.main import COMMANDS, main, settings_class_of
from packtrain.common.options import flag, option_fields

BASH_TRY = """
set -u
complete_line() {
  COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _packtrain; echo "${COMPREPLY[*]-}"
}
"""
# the words before the cursor, and what completes the last one
LINES = {
    "packtrain fine": "finetune",
    "packtrain plan ''": "train finetune",
    "packtrain plan train --pres": "--preset",
    "packtrain plan train --preset ''": "1m 15m 110m",
    "packtrain finetune --lora-ra": "--lora-rank",
    "packtrain finetune m.gguf --no-tens": "--no-tensorboard",
    "packtrain finetune --data ch": "",
    "packtrain finetune --optimizer s": "sgd",
    "packtrain generate --lora-ra": "",
}


@pytest.mark.skipif(not Path("/usr/bin/bash").exists(), reason="needs bash")
def test_bash_completes_commands_options_and_values():
    script = f"{bash_script()}\n{BASH_TRY}" + "".join(f"complete_line {line}\n" for line in LINES)
    process = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines() == list(LINES.values()) and process.stderr == ""


def test_scripts_have_every_command_and_option(capsys):
    for shell, script in (("bash", bash_script()), ("fish", fish_script())):
        assert main(["completion", shell]) == 0 and capsys.readouterr().out.strip() == script
        for command in COMMANDS:
            for field in option_fields(settings_class_of(command)):
                name = flag(field.name)
                if not field.metadata.get("positional"):
                    assert (f"-l {name[2:]}" if shell == "fish" else f" {name}") in script, name
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("#compdef packtrain\n")
    assert main(["completion", "csh"]) == 2
    assert "SHELL is csh; it must be one of bash, zsh, fish" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_scripts(shell, capsys, tmp_path):
    if not Path(f"/usr/bin/{shell}").exists():
        pytest.skip(f"needs {shell}")
    main(["completion", shell])
    (tmp_path / "script").write_text(capsys.readouterr().out)
    process = subprocess.run(
        [shell, "-n", str(tmp_path / "script")], capture_output=True, text=True
    )
    assert (process.returncode, process.stderr) == (0, "")
