"""packtrain on arm64 under emulation: python -m benchmarks.arm64 [--parts short|whole|NAME,…] [--limit SECONDS]

    doctor    packtrain doctor finds the machine's kind and no problem
    check     packtrain check: values and gradients of all ops; `ops`: of the few in OPS, whose kernels compile soon
    tiny      tests/test_tiny.py: build, train, generate
    plan      tests/test_plan.py
    products  tests/test_products.py
    train     20 steps from random weights: the first loss is this machine's, the last is lower
    lora      a LoRA, on stories260K or else on what `train` wrote, killed and resumed, bit for bit; merged; its text
    compile   a table: seconds and memory in which each kernel module is compiled, beside this machine's

All stands in one folder, build/arm64: QEMU, Debian's Python for arm64 and what it needs, unpacked, the wheels for
aarch64 from PyPI and packtrain's own, and all caches. Nothing is installed, no root is needed: bin/python is a script
that starts QEMU with Debian's Python, so that children that are started as sys.executable are emulated, too.
Exit codes: 0 if all parts passed, 1 if one failed, NOT_RUN if the packages cannot be had, which says why.
Parts that would begin after --limit seconds (480 for `short`) are left out; one that still runs then is ended. Both are
named.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

if sys.platform == "win32":
    raise SystemExit("benchmarks.arm64 needs Linux")

SOURCE = Path(__file__).parent.parent
STORIES = SOURCE.parent / "shared/data/models/stories260K/stories260K.gguf"
SETS = {
    "short": "doctor,ops",
    "whole": "doctor,check,tiny,plan,products,train,lora",
}
SHORT_SECONDS = 480
NOT_RUN = 3
FOLDERS = {"HOME": "home", "TMPDIR": "tmp"}
PACKAGES = "python3", "libstdc++6"  # and QEMU, of this machine's architecture
IGNORED = shutil.ignore_patterns("__pycache__")
OPS = "mul", "sum", "rms_norm", "rope", "silu"  # whose kernels are soon compiled
# Neoverse N1, as in Graviton 2 and Ampere Altra. LLVM would read the emulating machine's /proc/cpuinfo
CPU = "neoverse-n1"
FEATURES = "+fp-armv8,+neon,+crc,+aes,+sha2,+lse,+rdm,+fullfp16,+rcpc,+dotprod"
WHEELS = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (31, 28, 27, 17)]
TOY = [
    *("--dim", "32", "--layers", "1", "--heads", "2", "--kv-heads", "1", "--ffn", "48", "-c", "32"),
    *("--batch-size", "2", "--vocab-size", "320", "--iters", "20", "--seed", "1"),
]
TUNE = ["--iters", "8", "--batch-size", "2", "--ctx", "64", "--save-every", "2", "--seed", "1"]
# of the first loss, by which it may differ from this machine's: sums in f32 have another order. Later ones are printed
LOSS_ERROR = 1e-5


class NotAvailable(Exception):
    """A package of Debian's cannot be had here."""


class Failed(Exception):
    """A part is not as it should be."""


class OutOfTime(Exception):
    """A part did not finish within --limit."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The emulated machine in its folder, its cache of kernels, and when its time ends, by time.monotonic()."""

    folder: Path
    cache: Path
    end_time: float

    @property
    def python(self) -> Path:
        return self.folder / "venv/bin/python"

    def variables(self) -> dict[str, str]:
        paths = {name: str(self.folder / folder) for name, folder in FOLDERS.items()}
        ignored = "PYTHONDONTWRITEBYTECODE", "PACKTRAIN_CPU"
        inherited = {name: value for name, value in os.environ.items() if name not in ignored}
        paths["XDG_CACHE_HOME"] = str(self.cache)
        cpu = {"NUMBA_CPU_NAME": CPU, "NUMBA_CPU_FEATURES": FEATURES, "QEMU_CPU": CPU}
        return inherited | paths | cpu

    def run(self, command: Sequence[str]) -> str:
        """Run an emulated Python with these arguments; returns what it prints. Raises Failed, OutOfTime."""
        seconds = self.end_time - time.monotonic()
        timeout = None if math.isinf(seconds) else max(seconds, 0)
        return run([str(self.python), *command], self.folder / "work", self.variables(), timeout)

    def packtrain(self, *command: str) -> str:
        return self.run(["-m", "packtrain", *command])

    def test(self, name: str) -> str:
        output = self.run(["-m", "pytest", "-p", "no:cacheprovider", f"tests/{name}.py"])
        return output.strip().splitlines()[-1]


def run(
    command: Sequence[str],
    cwd: Path = SOURCE,
    env: dict[str, str] | None = None,
    timeout: float | None = None,
) -> str:
    """Run a command; returns what it prints to both streams. Raises Failed, OutOfTime."""
    pipe, out = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(
        command, cwd=cwd, env=env, stdout=pipe, stderr=out, text=True, start_new_session=True
    ) as child:
        try:
            output, _ = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            raise OutOfTime from None
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
    if child.returncode:
        raise Failed(f"exit {child.returncode}: {' '.join(command[:6])} …\n{output[-4000:]}")
    return output


# ---- the emulated root ------------------------------------------------------------------------------------------


def build(folder: Path) -> None:
    """Build or complete the machine in its folder. Raises NotAvailable, Failed."""
    if not (folder / "root.ready").exists():
        shutil.rmtree(folder / "root", ignore_errors=True)
        unpack_packages(folder)
        (folder / "root.ready").touch()
    (python,) = (folder / "root/usr/bin").glob("python3.[0-9]*[0-9]")
    venv = folder / "venv"
    write_interpreter(folder, python)
    for name in ("work", *FOLDERS.values()):
        (folder / name).mkdir(exist_ok=True)
    for name in ("tests", "benchmarks"):  # which test the package that is installed
        shutil.copytree(SOURCE / name, folder / "work" / name, dirs_exist_ok=True, ignore=IGNORED)
    shutil.copy(SOURCE / "pyproject.toml", folder / "work")
    version = python.name.removeprefix("python")
    site = venv / f"lib/{python.name}/site-packages"
    pip = [sys.executable, "-m", "pip"]
    quiet = ["--quiet", "--disable-pip-version-check"]
    target = ["--target", str(site), "--upgrade", "--only-binary=:all:"]
    cross = [*WHEELS, "--python-version", version, "--implementation", "cp"]
    shutil.rmtree(folder / "wheels", ignore_errors=True)
    run([*pip, "wheel", *quiet, "--no-deps", "-w", str(folder / "wheels"), str(SOURCE)])
    (wheel,) = map(str, (folder / "wheels").glob("packtrain-*.whl"))
    if (folder / "wheels.ready").exists():
        run([*pip, "install", *quiet, *target, *cross, "--no-deps", wheel])
        return
    run([*pip, "install", *quiet, *target, *cross, f"{wheel}[grammar]", "pytest", "gguf"])
    (folder / "wheels.ready").touch()


def unpack_packages(folder: Path) -> None:
    """Fetch Debian's packages, by lists of our own in the folder, and unpack them. Raises NotAvailable."""
    try:
        architecture = run(["dpkg", "--print-architecture"]).strip()
        run(["apt-get", "--version"])
    except OSError as error:
        raise NotAvailable(f"no packages of Debian's: {error}") from None
    apt = folder / "apt"
    (apt / "lists/partial").mkdir(parents=True, exist_ok=True)
    (apt / "cache/archives/partial").mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    settings = [
        "APT::Architecture=arm64", "APT::Architectures::=arm64", f"APT::Architectures::={architecture}",
        f"Dir::State={apt}", f"Dir::State::lists={apt}/lists", f"Dir::State::status={apt}/status",
        f"Dir::Cache={apt}/cache", "APT::Install-Recommends=false", "APT::Sandbox::User=",
        "APT::Update::Post-Invoke-Success::=", "Acquire::Languages=none", "Acquire::Retries=2",
    ]  # fmt: skip
    command = ["apt-get", "-qq", *(f"-o{setting}" for setting in settings)]
    try:
        run([*command, "update"], timeout=120)
        run([*command, "install", "-y", "--download-only", *PACKAGES], timeout=180)
        run(
            [*command, "download", f"qemu-user-static:{architecture}"],
            apt / "cache/archives",
            timeout=120,
        )
    except (Failed, OutOfTime) as error:
        raise NotAvailable(f"apt-get could not fetch the packages: {error}") from None
    for package in sorted((apt / "cache/archives").glob("*.deb")):
        is_qemu = package.name.startswith("qemu")
        run(["dpkg-deb", "-x", str(package), str(folder / ("qemu" if is_qemu else "root"))])


def write_interpreter(folder: Path, python: Path) -> None:
    """Write bin/python, a script that emulates Debian's Python, and what makes its folder a virtual environment."""
    script = folder / "venv/bin/python"
    script.parent.mkdir(parents=True, exist_ok=True)
    qemu = folder / "qemu/usr/bin/qemu-aarch64-static"
    root = folder / "root"
    script.write_text(f'#!/bin/sh\nexec "{qemu}" -L "{root}" -0 "$0" "{python}" "$@"\n')
    script.chmod(0o755)
    settings = f"home = {python.parent}\ninclude-system-site-packages = false\n"
    (folder / "venv/pyvenv.cfg").write_text(settings)


# ---- the parts --------------------------------------------------------------------------------------------------


def doctor(machine: Machine) -> str:
    output = machine.packtrain("doctor")
    require("for NEON" in output and "problem: none" in output, output)
    return next(line for line in output.splitlines() if line.startswith("platform"))


def check(machine: Machine, *names: str) -> str:
    output = machine.packtrain("check", *names)
    return next(line for line in output.splitlines() if " cases of " in line)


def ops(machine: Machine) -> str:
    return check(machine, *OPS)


def tiny(machine: Machine) -> str:
    return machine.test("test_tiny")


def plan(machine: Machine) -> str:
    return machine.test("test_plan")


def products(machine: Machine) -> str:
    return machine.test("test_products")


def train(machine: Machine) -> str:
    work = machine.folder / "work"
    command = ["train", "--data", str(SOURCE / "docs/guide.md"), *TOY, "--overwrite"]
    machine.packtrain(*command, "-o", "toy.gguf")
    run_here(work, *command, "-o", "host/toy.gguf")
    return same_losses(work / "toy.run", work / "host/toy.run")


def lora(machine: Machine) -> str:
    work = machine.folder / "work"
    base = STORIES if STORIES.exists() else work / "toy.gguf"
    if not base.exists():
        train(machine)
    pairs = ((a, b) for a in range(8) for b in range(8))
    chats = [{"prompt": f"what is {a} and {b}?", "completion": f"{a + b}"} for a, b in pairs]
    (work / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    command = ["finetune", str(base), "--data", str(work / "chats.jsonl"), *TUNE]
    run_here(work, *command, "--overwrite", "-o", "host/tuned.gguf")
    machine.packtrain(*command, "--overwrite", "-o", "tuned.gguf")
    losses = same_losses(work / "tuned.run", work / "host/tuned.run")
    step = tune_and_kill(machine, [*command, "-o", "killed/tuned.gguf"])
    machine.packtrain(*command, "-o", "killed/tuned.gguf", "--resume")
    for file in ("tuned.gguf", "tuned.run/adapter.gguf"):
        undisturbed, resumed = work / file, work / "killed" / file
        require(undisturbed.read_bytes() == resumed.read_bytes(), f"{resumed} is not {undisturbed}")
    adapter = "tuned.run/adapter.gguf"
    machine.packtrain("merge", str(base), adapter, "-o", "merged.gguf", "--overwrite")
    question = "-p", "Once upon a time", "-n", "16", "--temp", "0"
    emulated_text, host_text = (
        first_line(output)
        for output in (
            machine.packtrain("generate", "merged.gguf", *question),
            run_here(work, "generate", "merged.gguf", *question),
        )
    )
    require(emulated_text == host_text, f"{emulated_text!r} is {host_text!r} on this machine")
    return f"{losses}; killed after step {step} and resumed bit for bit; {emulated_text!r}"


def compile_all(machine: Machine) -> str:
    """Compile all modules, here and emulated, each in a child of its own; returns a table of both, and their ratios."""
    tables = list[dict[str, dict[str, float]]]()
    for name, python in (("emulated", machine.run), ("host", host_python)):
        kernels = machine.folder / "compiled" / name
        shutil.rmtree(kernels, ignore_errors=True)
        output = python(["-m", "benchmarks.compile_modules", str(kernels)])
        rows = map(json.loads, (line for line in output.splitlines() if line.startswith("{")))
        tables.append({row.pop("module"): row for row in rows})
    emulated, native = tables
    lines = [
        "",
        "| module | s | s here | ratio | MiB | MiB here | ratio |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, row in emulated.items():
        seconds, mib = (
            f"{row[key]:.0f} | {native[name][key]:.0f} | {row[key] / native[name][key]:.1f}"
            for key in ("seconds", "mib")
        )
        lines.append(f"| {name} | {seconds} | {mib} |")
    return "\n".join(lines)


def tune_and_kill(machine: Machine, command: list[str]) -> int:
    """Run a command until its first checkpoint is written, and kill it; returns how many steps it had logged."""
    folder = machine.folder / "work"
    shutil.rmtree(folder / "killed", ignore_errors=True)
    (folder / "killed").mkdir()
    start = [str(machine.python), "-m", "packtrain", *command]
    with open(folder / "killed.log", "w") as log:
        child = subprocess.Popen(start, cwd=folder, env=machine.variables(), stdout=log, stderr=log)
        try:
            while (
                child.poll() is None and not (folder / "killed/tuned.run/checkpoint.gguf").exists()
            ):
                time.sleep(0.01)
                if time.monotonic() > machine.end_time:
                    raise OutOfTime
        finally:
            child.kill()
            child.wait()
    require(child.returncode == -signal.SIGKILL, (folder / "killed.log").read_text())
    return len(losses_of(folder / "killed/tuned.run"))


def host_python(command: Sequence[str], cwd: Path = SOURCE) -> str:
    """Run this machine's own Python with these arguments; returns what it prints. Raises Failed."""
    paths = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))
    return run([sys.executable, *command], cwd, {**os.environ, "PYTHONPATH": paths})


def run_here(work: Path, *command: str) -> str:
    (work / "host").mkdir(exist_ok=True)
    return host_python(["-m", "packtrain", *command], work)


def losses_of(run_folder: Path) -> list[float]:
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


def same_losses(run_folder: Path, host_folder: Path) -> str:
    """Compare the losses of a run with those of the run on this machine, and describe both. Raises Failed."""
    losses, host_losses = losses_of(run_folder), losses_of(host_folder)
    errors = [abs(a - b) / abs(b) for a, b in zip(losses, host_losses, strict=True)]
    is_same = errors[0] <= LOSS_ERROR and losses[-1] < losses[0]
    require(is_same, f"losses {losses}, on this machine {host_losses}")
    text = f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps"
    return f"{text}, beside this machine's {errors[0]:.0e} off at first, at most {max(errors):.0e}"


def first_line(output: str) -> str:
    """Return the text that `packtrain generate` writes, without the line about speed."""
    return output.partition("\nprompt ")[0].strip()


def require(condition: bool, fact: str) -> None:
    if not condition:
        raise Failed(fact)


PARTS: dict[str, Callable[[Machine], str]] = {
    "doctor": doctor, "check": check, "ops": ops, "tiny": tiny, "plan": plan, "products": products,
    "train": train, "lora": lora, "compile": compile_all,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.arm64")
    parser.add_argument("--parts", default="whole", help="short, whole, or names and commas")
    parser.add_argument("--limit", type=float, help="seconds, building included")
    parser.add_argument("--folder", type=Path, default=SOURCE / "build/arm64")
    parser.add_argument("--cache", type=Path, help="for kernels that later runs use, too")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that children end, too
    names = SETS.get(args.parts, args.parts).split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(
            f"--parts: {', '.join(unknown)}: must be short, whole, or of {', '.join(PARTS)}"
        )
    start_time = time.monotonic()
    limit = args.limit or (SHORT_SECONDS if args.parts == "short" else math.inf)
    folder = args.folder.resolve()
    machine = Machine(folder, (args.cache or folder / "cache").resolve(), start_time + limit)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        build(folder)
    except NotAvailable as error:
        print(f"arm64: nothing was run: {error}")
        return NOT_RUN
    print(f"arm64: built in {time.monotonic() - start_time:.0f} s", flush=True)
    results = [run_part(machine, name) for name in names]
    counts = ((word, results.count(word)) for word in ("passed", "failed", "left out"))
    print(f"arm64: {', '.join(f'{count} {word}' for word, count in counts if count)}")
    return int("failed" in results)


def run_part(machine: Machine, name: str) -> str:
    """Run a part and print its line; returns passed, failed or left out."""
    part_start = time.monotonic()
    if part_start > machine.end_time:
        print(f"arm64 {name}: left out, for want of time", flush=True)
        return "left out"
    try:
        fact, result = PARTS[name](machine), "passed"
    except Failed as error:
        fact, result = str(error), "failed"
    except OutOfTime:
        fact, result = "it had not finished when the time was up", "left out"
    print(f"arm64 {name}: {result} after {time.monotonic() - part_start:.0f} s: {fact}", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
