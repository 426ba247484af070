"""docs/reference.md from the settings of the commands: `python -m tests.reference` writes it."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from packtrain.cli.main import _build_parser
from packtrain.common.familiar_names import ADVICE, ALIASES

PAGE = Path(__file__).parent.parent / "docs" / "reference.md"
HEAD = """# Commands

Written by `make reference` from the settings themselves. Every flag is also a key of the YAML file that `--config`
reads: `--batch-size` is `batch_size`. `--help` of a command shows the flags that most runs need, `--help-all` every
flag by group. Sizes take KiB, MiB and GiB. Exit codes: 0 done, 1 failed (a full disk, three non-finite steps in a row),
2 wrong input, 3 does not fit into `--memory`, 130 stopped by Ctrl-C after saving.

Every flag is an environment variable, too: `PACKTRAIN_BATCH_SIZE`. The command line wins over variables, these over
the YAML file, which `PACKTRAIN_CONFIG` may name, and the file over defaults. `1` and `0` turn on and off; several
values stand in brackets: `PACKTRAIN_LORA_RANK='[8, attn_q=16]'`. Further variables are `PACKTRAIN_CPU` (compile for
`avx2` or `avx512`), `PACKTRAIN_DEBUG`, `NUMBA_NUM_THREADS` or `OMP_NUM_THREADS` (threads of commands without
`--threads`) and `XDG_CACHE_HOME` (where kernels and tokens are cached).
"""

OTHER_NAMES = """## Names of other tools

`train`, `finetune` and `plan` take these names of llama.cpp's finetune and train-text-from-scratch, mlx-lm, PEFT, TRL,
axolotl and unsloth, as flags, in YAML files and as keywords of the [library](library.md). In all names `_` stands for
`-`, and one dash for two: `-epochs`.
"""


def parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command with its parser, `plan train` after `plan`."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                subparsers = list(parsers(sub))
                yield from ((f"{name} {sub_name}", subparser) for sub_name, subparser in subparsers)
                if not subparsers:
                    yield name, sub


def row(action: argparse.Action) -> str:
    flags = ", ".join(f"`{flag}`" for flag in action.option_strings) or f"`{action.dest.upper()}`"
    value = ", ".join(map(str, action.choices)) if action.choices else action.metavar or ""
    cells = flags, value if isinstance(value, str) else " ".join(value), action.help or ""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("%%", "%") for cell in cells) + " |"


def section(name: str, parser: argparse.ArgumentParser) -> str:
    lines = [f"## packtrain {name}", (parser.description or "").strip(), ""]
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.dest != "help"]
        if actions:
            lines += [
                f"**{group.title}**",
                "",
                "| flag | value | meaning (default) |",
                "|---|---|---|",
            ]
            lines += [*map(row, actions), ""]
    return "\n".join(lines)


def other_names() -> str:
    """The names of other tools' options, with packtrain's."""
    names_by_option, names_by_advice = dict[str, list[str]](), dict[str, list[str]]()
    for table, by_text in ((ALIASES, names_by_option), (ADVICE, names_by_advice)):
        for name, text in table.items():
            by_text.setdefault(text, []).append(f"`{name}`")
    return "\n".join([
        OTHER_NAMES,
        "| packtrain | other names |",
        "|---|---|",
        *(f"| `{option}` | {', '.join(names)} |" for option, names in names_by_option.items()),
        "",
        "These mean something else, and are refused with the sentence beside them:",
        "",
        "| names | instead |",
        "|---|---|",
        *(f"| {', '.join(names)} | {text} |" for text, names in names_by_advice.items()),
        "",
    ])  # fmt: skip


def page() -> str:
    sections = (section(name, parser) for name, parser in parsers(_build_parser()))
    return "\n".join([HEAD, *sections, other_names()])


if __name__ == "__main__":
    PAGE.write_text(page())
