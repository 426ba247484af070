"""The command line before any work: names that are misspelt, values that cannot be, streams that are closed."""

import gc
import io
import os
import shlex
import signal
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest

from packtrain.cli import help as help_command
from packtrain.cli import main as cli
from packtrain.cli.main import COMMANDS, main
from packtrain.common.errors import InputError
from packtrain.common.options import GROUPS, option, to_yaml
from packtrain.common.options import flag as flag_of
from packtrain.common.text import did_you_mean, plural, use_colour
from packtrain.kernels.runtime import environment
from packtrain.training.finetune_settings import TuneSettings
from packtrain.training.train_settings import TrainSettings
from tests.test_model_file import save


def run_main(arguments, capsys) -> tuple[int, list[str]]:
    """The exit code and the lines on standard error."""
    try:
        code = main(arguments)
    except SystemExit as error:  # argparse leaves by itself
        code = error.code
    return code, capsys.readouterr().err.strip().splitlines()


WRONG = {
    "tran": "there is no command tran; did you mean train?; see packtrain --help",
    "xyzzy": "there is no command xyzzy; there are demo, train, finetune, plan, ",
    "run m.gguf": "there is no command run; did you mean chat?",
    "fuse m.gguf a.gguf": "there is no command fuse; did you mean merge?",
    "plan trian": "there is no command plan trian; did you mean train?",
    "train --momory 2GiB": "no option --momory; did you mean --memory?; see packtrain train --help",
    "train --mem 2GiB": "there is no option --mem; did you mean --memory?",
    "plan finetune --lora_rang 4": "there is no option --lora_rang; did you mean --lora-rank?",
    "train --memory=2GiB --vocabsize=3": "no option --vocabsize; did you mean --vocab-size?",
    "generate --modle": "there is no option --modle; see",
    "--vresion": "there is no option --vresion; did you mean --version?",
    "-z": "there is no option -z; see packtrain --help",
    "train -z": "there is no option -z; see packtrain train --help",
    "plan train --calibrate": "there is no option --calibrate; see packtrain plan train --help",
    "finetune --mesure-speed": "no option --mesure-speed; did you mean --measure-speed?",
    "train notes.txt": "unexpected argument notes.txt; should it be --data notes.txt?; see packtrain train --help",
    "finetune base.gguf chats.csv": "unexpected argument chats.csv; should it be --data chats.csv?",
    "generate base.gguf Hello!": "unexpected argument Hello!; should it be --prompt 'Hello!'?",
    "merge base.gguf a.gguf b.gguf -o c.gguf d.gguf": "unexpected argument d.gguf; see packtrain merge --help",
    "finetune base.gguf --data a.csv -o new/": "--output: new/ is a folder; add a file's name: new/model.gguf",
    "generate": "the following arguments are required: MODEL; see packtrain generate --help",
    "train --preset 15": "--preset is 15; it must be one of 1m, 15m, 110m; did you mean 15m?",
    "train --optimizer adam": "one of adamw, sgd, muon, lbfgs, adamw8bit, muon8bit; did you mean adamw?",
    "train --iters 1e3": "--iters is '1e3'; it must be a whole number",
    "train --iters -1": "--iters is -1; it must be from 0 to 1000000000000",
    "train --lr fast": "--lr is 'fast'; it must be a number",
    "train --lr nan": "--lr is nan; it must be finite",
    "train --epochs 1e300": "--epochs is 1e+300; it must be from 0.001 to 1000000.0",
    "train --iters 99999999999999": "--iters is 99999999999999; it must be from 0 to 1000000000000",
    "train --memory 1KiB": "--memory: 1KiB is too little; it must be from 1MiB to",
    "train --memory 9999999999TiB": "--memory: 9999999999TiB is too much; it must be from 1MiB",
    "train --lr": "--learning-rate: expected one argument",
    "train --val-split 0.9": "--val-split is 0.9; it must be from 0 to 0.5",
    "generate m.gguf --top-p 2": "--top-p is 2.0; it must be from 0 to 1",
    "eval m.gguf": "--data must be given: ",
    "train --config nowhere.yaml": "--config: nowhere.yaml cannot be read: no such file",
}  # fmt: skip


@pytest.mark.parametrize("command_line", WRONG)
def test_a_wrong_command_line_gets_one_clear_line(command_line, capsys):
    code, lines = run_main(command_line.split(), capsys)
    assert code == 2 and len(lines) == 1, lines
    assert lines[0].startswith("packtrain: error: ") and WRONG[command_line] in lines[0], lines


def test_settings_files_are_held_apart_from_flags(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    for text, flags, line in (
        ("lorra_rank: 4", [], f"{path}: there is no setting lorra_rank; did you mean lora_rank?"),
        ("lr: fast", [], f"{path}: lr is 'fast'; it must be a number"),
        ("lr: 1e-3", ["--iters", "-2"], "error: --iters is -2; it must be from 0 to 1000000000000"),
        (
            "optimizer: sdg",
            [],
            f"{path}: optimizer is sdg; it must be one of adamw, sgd, muon, lbfgs, adamw8bit, muon8bit; did you",
        ),
        ("lora_rank: [3]\niters: '7'", [], "the model must be given"),  # both are taken
    ):
        path.write_text(text)
        code, lines = run_main(["finetune", "--config", str(path), *flags], capsys)
        assert code == 2 and line in lines[-1], lines


def test_debugging_switches_are_known_ones(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PACKTRAIN_DEBUG", "nan,foo")
    code, lines = run_main(["inspect", str(tmp_path / "m.gguf")], capsys)
    assert code == 2 and "PACKTRAIN_DEBUG: foo unknown; choose from graph, place" in lines[0]


def test_ctrl_c_while_a_command_is_loaded_is_one_line(capsys, monkeypatch):
    def stopped(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", stopped)
    code, lines = run_main(["inspect", "m.gguf"], capsys)
    assert code == 130 and lines == ["packtrain: stopped at once, without saving"]


def test_ctrl_c_while_a_command_is_loaded_waits_until_it_is(capsys, monkeypatch):
    load, loaded = cli._command_module, list[str]()

    def interrupted(name: str) -> object:
        os.kill(os.getpid(), signal.SIGINT)  # within NumPy it would become an ImportError
        loaded.append(name)
        return load(name)

    monkeypatch.setattr(cli, "_command_module", interrupted)
    before = signal.getsignal(signal.SIGINT)
    code, lines = run_main(["inspect", "m.gguf"], capsys)
    assert code == 130 and lines == ["packtrain: stopped at once, without saving"]
    assert loaded and signal.getsignal(signal.SIGINT) is before and gc.isenabled()


def test_other_threads_run_commands_that_load_little(capsys):
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(main, []).result() == 2
    assert "quantize" in capsys.readouterr().out and gc.isenabled()


def test_a_cpu_to_compile_for_is_one_that_is_here(tmp_path, capsys, monkeypatch):
    """Code for features that the CPU lacks would end the process by a signal."""
    monkeypatch.setitem(
        environment.CPUS, "later", {"CPU_NAME": "later", "CPU_FEATURES": "+avx2,+z9"}
    )
    for cpu_name, sentence in (
        (
            "AVX2",
            "PACKTRAIN_CPU: AVX2 is unknown; it must be avx2 or avx512 or x86-64-v3 or later, or unset",
        ),
        ("later", "PACKTRAIN_CPU: later: this CPU has no "),
    ):
        monkeypatch.setenv("PACKTRAIN_CPU", cpu_name)
        code, lines = run_main(["inspect", str(tmp_path / "m.gguf")], capsys)
        assert code == 2 and len(lines) == 1 and sentence in lines[0], lines


def test_names_that_were_meant():
    options = ("--memory", "--max-grad-norm", "-o", "--output")
    assert did_you_mean("--memroy", options) == "; did you mean --memory?"
    assert did_you_mean("--max", options) == "; did you mean --max-grad-norm?"
    assert did_you_mean("--MEMORY", options) == "; did you mean --memory?"
    assert did_you_mean("--colour", options) == did_you_mean("--", options) == ""


def test_counts():
    assert [plural(n, "document") for n in (0, 1, 2)] == [
        "0 documents",
        "1 document",
        "2 documents",
    ]
    assert plural(1, "matrix", "matrices") == "1 matrix"
    assert plural(1234, "matrix", "matrices") == "1,234 matrices"


@pytest.mark.parametrize(
    ("variables", "terminal", "colour"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"TERM": "dumb"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_colour(monkeypatch, variables, terminal, colour):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert use_colour(stream) == colour


# ---- help


def test_every_option_of_a_run_has_a_group_and_help(capsys):
    for settings in (TrainSettings, TuneSettings):
        for field in settings.__dataclass_fields__.values():
            about = field.metadata
            assert about["help"] and (about.get("positional") or about["group"] in GROUPS), (
                field.name
            )
    for name in COMMANDS:
        with pytest.raises(SystemExit) as error:
            main([*name.split(), "--help-all"])
        assert error.value.code == 0
        text = capsys.readouterr().out
        assert f"usage: packtrain {name}" in text
        headings = [line.rstrip(":") for line in text.splitlines() if line.endswith(":")]
        groups = [heading for heading in headings if heading in GROUPS]
        assert groups == sorted(groups, key=GROUPS.index)


@pytest.mark.parametrize("columns, longest", [(80, 80), (100, 100), (240, 100)])
def test_a_help_is_short_and_help_all_has_every_option(columns, longest, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    for name in COMMANDS:
        helps = dict[str, list[str]]()
        for option_name in ("--help", "--help-all"):
            with pytest.raises(SystemExit) as error:
                main([*name.split(), option_name])
            assert error.value.code == 0
            helps[option_name] = capsys.readouterr().out.splitlines()
            max_width = longest if option_name == "--help" else 100
            assert max(map(len, helps[option_name])) <= max_width, name
        assert len(helps["--help"]) <= 44, f"{name}: {len(helps['--help'])} lines"
        full_help = " ".join(helps["--help-all"])
        for field in fields(cli.settings_class_of(name)):
            shown = field.name.upper() if field.metadata.get("positional") else flag_of(field.name)
            assert f" {shown}" in full_help.replace("--[no-]", "--"), shown
        short = bool(getattr(cli.settings_class_of(name), "COMMON", ""))
        assert short == any("--help-all shows every option" in line for line in helps["--help"])
        assert short or len(fields(cli.settings_class_of(name))) <= 25, f"{name} needs a COMMON"


def test_a_short_help_has_the_common_options_in_their_order(capsys):
    with pytest.raises(SystemExit):
        main(["finetune", "--help"])
    printed = capsys.readouterr().out
    places = [printed.index(f" {flag_of(name)}") for name in ("data", "output", "memory", "seed")]
    assert places == sorted(places) and "MODEL" in printed and "--armijo" not in printed
    assert "--[no-]full " in printed and "--epochs" in printed and "--config" not in printed


def test_every_help_ends_with_an_example_that_is_a_command_line(capsys):
    parser = cli._build_parser()
    for name, (*_, example) in COMMANDS.items():
        options = parser.parse_args(shlex.split(example.partition(" >>")[0]))
        assert options.command == name
        for flag_name in ("--help", "--help-all"):
            with pytest.raises(SystemExit):
                main([*name.split(), flag_name])
            text = " ".join(capsys.readouterr().out.split())
            assert f"example: packtrain {example}; every option is an environment variable" in text


def test_help_of_a_topic_is_a_part_of_the_guide(capsys):
    guide = " ".join(Path("docs/guide.md").read_text().split())
    for topic in help_command.TOPICS:
        assert main(["help", topic]) == 0
        paragraphs = help_command.topic_text(topic).split("\n\n")
        assert paragraphs[0] and capsys.readouterr().out.startswith(paragraphs[0])
        assert all(" ".join(paragraph.split()) in guide for paragraph in paragraphs)
    assert "--memory" in help_command.topic_text("memory")
    assert "--resume" in help_command.topic_text("resume")


def test_help_of_a_command_is_its_help(capsys):
    assert main(["help", "plan", "train"]) == 0
    assert "usage: packtrain plan train" in capsys.readouterr().out
    assert main(["help"]) == 0
    text = capsys.readouterr().out
    assert "usage: packtrain [-h]" in text and "TOPIC: a command, or base, data, memory" in text
    code, lines = run_main(["help", "memroy"], capsys)
    assert code == 2 and "there is no topic memroy; did you mean memory?" in lines[-1]


def test_options_without_a_group_stand_by_themselves():
    assert option(1, "what").metadata["group"] == ""
    assert "lr:" in to_yaml(TrainSettings())


# ---- streams


def run_shell(command: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A shell command, in which P is packtrain with the arguments."""
    words = [sys.executable, "-m", "packtrain", *arguments]
    line = command.replace("P", " ".join(map(shlex.quote, words)), 1)
    env = {**os.environ, **variables}
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env=env, check=False
    )


def test_streams_that_are_closed(tmp_path):
    model = tmp_path / "m.gguf"
    save(model)
    process = run_shell("P <&-", "chat", str(model))
    assert (process.returncode, "Traceback" in process.stderr) == (0, False), process.stderr
    process = run_shell("P <&- >&- 2>&-", "inspect", str(model))
    assert (process.returncode, process.stderr) == (0, "")
    process = run_shell("P | head -n 1; exit ${PIPESTATUS[0]}", "inspect", str(model), "--tensors")
    assert process.returncode in (0, 1) and process.stderr == "", "it may have written all before"
    process = run_shell("P > /dev/full", "inspect", str(model))
    assert process.returncode == 1
    assert process.stderr == "packtrain: error: no space left on device\n"


def test_an_input_error_keeps_to_one_line():
    assert "\n" not in str(InputError("a\nb"))


@pytest.mark.parametrize("argument", ["--help", "--version", "trane"])
def test_what_needs_no_command_loads_none(argument: str) -> None:
    """Loading all of them takes a second."""
    seen = (
        "import sys; from packtrain.cli.main import main\n"
        f"try: main([{argument!r}])\n"
        "except SystemExit: pass\n"
        "print([m for m in sys.modules if m == 'numpy' or m.startswith('packtrain.cli.')"
        " and m != 'packtrain.cli.main'])"
    )
    done = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_of_a_package_in_an_archive_or_without_sources(tmp_path, monkeypatch, capsys) -> None:
    package = Path(cli.__file__).parents[1]
    with zipfile.ZipFile(tmp_path / "packtrain.zip", "w") as archive:
        for path in package.rglob("*.py"):
            archive.write(path, path.relative_to(package.parent))
    command = [sys.executable, "-P", "-m", "packtrain.cli.main", "--help"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "packtrain.zip")}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert "show what is in a GGUF file" in done.stdout, done.stderr
    monkeypatch.setattr(cli, "get_data", lambda *args: Path("no such file").read_bytes())
    main([])
    assert "show what is in a GGUF file" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["train", "--data", ""], "--data is empty; give a name"),
        (["train", "-o", "no.gguf", "--resume"], "--resume: no.run holds no run to continue"),
        (["finetune", "-o", "no.gguf", "--resume"], "--resume: no.run holds no run to continue"),
        (["plan", "train", "--layers", "9999"], "--layers is 9999; it must be from 1 to 1024"),
        (["plan", "train", "--ctx", "99999999999"], "it must be from 2 to 16777216"),
    ],
)
def test_settings_that_no_run_could_have(arguments, said, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.txt").write_text("a text that nobody asked for")
    code, lines = run_main(arguments, capsys)
    assert code == cli.BAD_INPUT and said in lines[-1]
