"""Whether this tree computes what another one does: the same commands in both, and what they leave, bit by bit.

    python -m benchmarks.equal --before FOLDER [--only PATTERN]

FOLDER is another checkout, such as `git worktree add` makes; the same Python runs both. Compared are losses and norms
of every step, all GGUF files with their metadata, and what is printed but for times and memory of the process; runs
that FOLDER begins and this tree ends are compared with those that FOLDER ran alone.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packtrain.gguf import GGUF
from packtrain.kernels.runtime.environment import cache_root
from packtrain.models.quant_recipe import MIXES
from tests import hugging_face
from tests.kill import sample_chats

REPO_ROOT = Path(__file__).parents[1]
WORK = REPO_ROOT / "build/equal"
RUN = "--ctx 128 --batch-size 2 --steps-per-eval 20 --no-tensorboard -o m.gguf"
SMALL = "--dim 256 --layers 2 --heads 4 --ffn 512 --vocab-size 300"
TRAIN = f"train --data ../text.txt {SMALL} {RUN}"
LORA = "--lora-rank 4 --adapter a.gguf"
BASES = "f32", "q8_0", "q4_k_m"
STEPS = "--iters 60"
MIN_MEMORY_RE = re.compile(r"the smallest --memory that would do is (?:about )?(\d+)MiB")
# what differs from run to run: lines that are printed, and keys
SUMS = "process|total|expected|spare|base"
VARYING = re.compile(
    rf"^(step |trained |  ({SUMS}) |packtrain: (?!error))|ns/s|B/s|\d s\b|measured|windows "
)
PASSING = {"tokens_per_second", "positions_per_second", "seconds", "packtrain.checkpoint.sha256"}
# name, commands, and the commands of a run that the other tree begins and this one ends
Case = tuple[str, list[str], list[str]]


def tune(base: str) -> str:
    return f"finetune ../{base}.gguf --data ../chats.jsonl --chat-template chatml {RUN}"


def cases() -> Iterator[Case]:
    runs = {
        "train": TRAIN,
        "train, sgd": f"{TRAIN} --optimizer sgd --lr 0.1",
        "train, no clipping": f"{TRAIN} --max-grad-norm 0 --no-random-offsets",
        "train, 3 micro-batches": f"{TRAIN} --grad-accumulation-steps 3",
        "train, recomputed": f"{TRAIN} --recompute blocks",
        "train, f16": f"{TRAIN} --type f16 --no-fill-samples",
        "full": f"{tune('f32')} --full --lr 1e-3",
        "full, bf16 masters": f"{tune('f32')} --full --lr 1e-3 --masters bf16",
        "full, sgd, last block": f"{tune('q8_0')} --full --optimizer sgd --lr 0.1 --num-layers 1",
        **{f"lora, {base}": f"{tune(base)} {LORA}" for base in BASES},
        "lora, plain, dropout": f"{tune('q4_k_m')} {LORA} --merge plain --lora-dropout 0.1",
    }
    for name, run in runs.items():
        yield name, [f"{run} {STEPS}"], []
        level = f"{run} --lr-scheduler constant --warmup-ratio 0"
        parts = [f"{level} --iters 40", f"{level} {STEPS} --resume"]
        yield f"{name}, resumed", [f"{level} {STEPS}"], parts
    for name in ("train", "train, 3 micro-batches", "lora, q4_k_m"):
        for extra_mib in (0, 1, 3, 6, 10):
            yield (
                f"{name}, + {extra_mib} MiB",
                [f"{runs[name]} --iters 20 --memory least+{extra_mib}MiB"],
                [],
            )
    yield from other_cases()


def other_cases() -> Iterator[Case]:
    """What does not train."""
    merge = "merge ../q8_0.gguf a.gguf -o"
    merges = [f"{merge} n.gguf", f"{merge} k.gguf --calibrate ../chats.jsonl --type q4_K"]
    yield "merge", [f"{tune('q8_0')} {LORA} --iters 5", *merges], []
    single = {f"quantize {mix}": f"quantize ../f32.gguf q.gguf {mix}" for mix in MIXES}
    single["quantize again"] = "quantize ../q8_0.gguf q.gguf Q4_K_S --allow-requantize --pure"
    for kind in sorted(os.listdir("checkpoints")):
        single[f"convert {kind}"] = f"convert ../checkpoints/{kind} -o c.gguf"
    for base in BASES:
        single[f"generate {base}"] = f"generate ../{base}.gguf -p the -n 48 --seed 3"
        single[f"eval {base}"] = f"eval ../{base}.gguf --data ../text.txt --ctx 64"
        single[f"inspect {base}"] = f"inspect ../{base}.gguf"
    for preset in ("1m", "15m", "110m"):
        single[f"plan {preset}"] = f"plan train --data ../text.txt --preset {preset}"
    single["plan finetune"] = f"plan {tune('q4_k_m')}"
    yield from ((name, [command], []) for name, command in single.items())


def packtrain(tree: Path, folder: str, command: str) -> subprocess.CompletedProcess[str]:
    env_variables = {"PYTHONPATH": str(tree), "XDG_CACHE_HOME": str(Path("cache").absolute())}
    argv = [sys.executable, "-m", "packtrain", *command.split()]
    return subprocess.run(
        argv, cwd=folder, env=os.environ | env_variables, capture_output=True, text=True
    )


def prepare(old_tree: Path) -> None:
    """In this folder: the kernels of both, text, conversations, three bases, checkpoints, and rates that stay."""
    Path("cache/packtrain").mkdir(parents=True)
    os.symlink(cache_root() / "kernels", "cache/packtrain/kernels")
    Path("text.txt").write_text("".join(f.read_text() for f in sorted(REPO_ROOT.glob("docs/*.md"))))
    Path("chats.jsonl").write_text(sample_chats())
    Path("base").mkdir()
    for base in BASES:
        train, pack = f"{TRAIN} --iters 30", f"quantize ../f32.gguf ../{base}.gguf {base}"
        done = packtrain(old_tree, "base", f"{train} -o ../f32.gguf" if base == "f32" else pack)
        assert done.returncode == 0, done.stderr
    for kind in hugging_face.KINDS:
        hugging_face.write_checkpoint(Path("checkpoints") / kind.replace(" ", "-"), kind)
    shutil.copytree("cache/packtrain", "rates", ignore=shutil.ignore_patterns("kernels", "tokens"))


def run(commands: Sequence[tuple[Path, str]], saved_name: str) -> Path:
    """Commands of trees, in a folder that is called the same for all, so that paths are equal; it is kept."""
    Path("here").mkdir()
    said = []
    for tree, command in commands:  # a run that was off corrects the rates for the next
        shutil.copytree("rates", "cache/packtrain", dirs_exist_ok=True)
        done = packtrain(tree, "here", command)
        lines = (done.stdout + done.stderr).splitlines()
        said += [line for line in lines if not VARYING.search(line)] + [f"exit {done.returncode}"]
    Path("here/said").write_text("\n".join(said))
    return Path("here").rename(saved_name)


def resolve_memory(command: str, old_tree: Path) -> str:
    """A command with the --memory that it asks for: so many MiB more than the least that both trees can do with."""
    base_command, has_memory, extra_mib = command.partition(" --memory least+")
    if not has_memory:
        return command
    refused = [
        packtrain(tree, "base", f"{base_command} --memory 1MiB") for tree in (old_tree, REPO_ROOT)
    ]
    min_mib = max(int(MIN_MEMORY_RE.findall(done.stderr)[0]) for done in refused)
    return f"{base_command} --memory {min_mib + int(extra_mib.removesuffix('MiB'))}MiB"


def differences(a: Path, b: Path, parts: bool) -> Iterator[str]:
    """What differs between two folders; of runs in parts, other files are left and other lines printed."""
    names = [{str(f.relative_to(folder)) for f in folder.rglob("*.gguf")} for folder in (a, b)]
    if not parts:
        yield from differing("files", *map(dict.fromkeys, names))
    for name in sorted(names[0] & names[1]):
        if (a / name).read_bytes() != (b / name).read_bytes():
            yield from (f"{name}: {change}" for change in in_file(GGUF(a / name), GGUF(b / name)))
    for log in a.rglob("metrics.jsonl"):
        yield from differing("steps", steps(log), steps(b / log.relative_to(a)))
    said = [(folder / "said").read_text().splitlines() for folder in (a, b)]
    lines = [line for line in said[0] + said[1] if (line in said[0]) != (line in said[1])]
    if lines and not parts:
        yield f"{len(lines)} printed lines, as {lines[0]!r}"
    if said[0][-1] != "exit 0":
        yield f"no case: {said[0][-2:]}"


def in_file(a: GGUF, b: GGUF) -> Iterator[str]:
    metadata_dicts = [{**file.metadata} for file in (a, b)]
    for metadata in metadata_dicts:
        for key in ("packtrain.checkpoint.progress", "packtrain.checkpoint.about"):
            metadata |= json.loads(metadata.pop(key, "{}"))
    arrays = [{name: hash(file.array(name).tobytes()) for name in file.entries} for file in (a, b)]
    yield from differing("metadata", *metadata_dicts)
    yield from differing("tensors", *arrays)


def differing(label: str, a: Mapping[str, object], b: Mapping[str, object]) -> Iterator[str]:
    differing_keys = [
        key for key in {**a, **b}.keys() - PASSING if str(a.get(key)) != str(b.get(key))
    ]
    if differing_keys:
        yield f"{label} {', '.join(sorted(differing_keys)[:3])} of {len(differing_keys)}"


def steps(log: Path) -> dict[str, object]:
    """What was logged of each step, but for times and memory; a resumed run may log one again."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return {
        str(r["step"]): {k: r[k] for k in sorted(r.keys() - PASSING)} for r in rows if "loss" in r
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--only", default="", help="pattern of names of cases")
    args = parser.parse_args()
    old_tree = args.before.absolute()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    os.chdir(WORK)
    prepare(old_tree)
    for name, commands, resumed in (case for case in cases() if re.search(args.only, case[0])):
        old_commands = [(old_tree, resolve_memory(command, old_tree)) for command in commands]
        new_commands = [(old_tree, command) for command in resumed[:-1]]
        new_commands += [
            (REPO_ROOT, command)
            for command in resumed[-1:] or (command for _, command in old_commands)
        ]
        sides = run(old_commands, f"{name}.before"), run(new_commands, f"{name}.now")
        print(f"{name:<36} {'; '.join(differences(*sides, bool(resumed))) or 'equal'}", flush=True)


if __name__ == "__main__":
    main()
