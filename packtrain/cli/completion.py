"""packtrain completion: print the completion of commands and options for bash, zsh or fish."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from shlex import quote
from textwrap import shorten

from packtrain.cli import DONE
from packtrain.cli.main import COMMANDS, settings_class_of
from packtrain.common.errors import InputError
from packtrain.common.options import flag, option_fields, positional

ZSH = "#compdef packtrain\nautoload -U +X compinit bashcompinit && compinit && bashcompinit"


@dataclass(frozen=True)
class CompletionSettings:
    """The shell whose completion is printed."""

    shell: str = positional("bash, zsh or fish")


def run(settings: CompletionSettings) -> int:
    """Print the completion script of a shell. Raises InputError for another shell."""
    scripts = {"bash": bash_script, "zsh": lambda: f"{ZSH}\n{bash_script()}", "fish": fish_script}
    if settings.shell not in scripts:
        raise InputError(f"SHELL is {settings.shell}; it must be one of {', '.join(scripts)}")
    print(scripts[settings.shell]())
    return DONE


def _options(command: str) -> Iterator[tuple[list[str], tuple[str, ...], str]]:
    """Yield each option of a command: its names, the values that it may have, its help."""
    for field in option_fields(settings_class_of(command)):
        about = field.metadata
        if not about.get("positional"):
            negation = [flag(f"no_{field.name}")] if field.type in (bool, "bool") else []
            names, values = [flag(field.name), *about["flags"], *negation], about.get("choices", ())
            yield names, tuple(values), about["help"]


def _command_words() -> list[str]:
    return [*dict.fromkeys(name.partition(" ")[0] for name in COMMANDS)]


def bash_script() -> str:
    """Return a bash function that completes commands, options, and values of those with choices."""
    choices, options = list[str](), list[str]()
    for command in COMMANDS:
        names_of_command = ["--help", "--help-all", "--config", "--debug"]
        for names, values, _ in _options(command):
            names_of_command += names
            patterns = "|".join(quote(f"{command} {name}") for name in names)
            choices += [f"  {patterns}) words={quote(' '.join(values))};;"] * bool(values)
        options.append(f"    {quote(command)}) words={quote(' '.join(names_of_command))};;")
    script = (resources.files("packtrain.cli") / "completion.bash").read_text("utf-8").rstrip()
    script = script.replace("@commands@", quote(" ".join(_command_words())))
    return script.replace("@choices@", "\n".join(choices)).replace("@options@", "\n".join(options))


def fish_script() -> str:
    """Return fish's completions, one line for each command and option."""
    start = "complete -c packtrain -n __fish_use_subcommand -fa"
    lines = [f"{start} {name}" for name in _command_words()]
    lines.append("complete -c packtrain -n '__fish_seen_subcommand_from plan' -fa 'train finetune'")
    for command in COMMANDS:
        condition = quote(f"__fish_seen_subcommand_from {command.partition(' ')[0]}")
        for names, values, text in _options(command):
            words = (f"-l {n[2:]}" if n[:2] == "--" else f"-o {n[1:]}" for n in names)
            has_values = f" -xa {quote(' '.join(values))}" if values else ""
            line = f"complete -c packtrain -n {condition} {' '.join(words)}{has_values}"
            lines.append(f"{line} -d {quote(shorten(text, 60, placeholder=' …'))}")
    return "\n".join(dict.fromkeys(lines))
