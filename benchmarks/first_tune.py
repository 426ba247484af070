"""The first tune, with the commands that README and guide name, as rows of benchmarks.real: its part `style`.

A support desk's made-up CSV of 82 rows in a house style; ten questions in words that no row has, answered with three
seeds each; the perplexity of a text that has nothing to do with it.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path

import packtrain as pt
from benchmarks.perplexity import our_perplexity
from benchmarks.real_base import CONTEXT, MIB, Row, Setup, failed
from benchmarks.tuning_data import HELD_OUT, in_style, support, write_csv
from benchmarks.watched import run_packtrain

# as README.md and docs/guide.md have them; a test holds that they do
COMMANDS = (
    "packtrain data chats.csv --model base.gguf --show 2",
    "packtrain plan finetune base.gguf --data chats.csv --memory 1GiB",
    "packtrain finetune base.gguf --data chats.csv --memory 1GiB -o tuned.gguf",
)
LIMIT, SECONDS, GROWTH = 1024 * MIB, 900, 0.10
STRICT, LOOSE = 9, 8  # of ten answers in style: at temperature 0, and at chat's own
SEEDS, TEXT_NBYTES = (0, 1, 2), 60_000


def style(setup: Setup) -> Iterator[Row]:
    """Commands, memory, time, answers in style for each seed, and what the model forgot."""
    work = setup.work / "style"
    work.mkdir(parents=True, exist_ok=True)
    seeds = SEEDS[:1] if setup.short else SEEDS
    text = work / "text.txt"
    text.write_bytes(setup.text.read_bytes()[:TEXT_NBYTES].decode(errors="ignore").encode())
    base_perplexity = our_perplexity(setup.base, text, CONTEXT).perplexity
    for seed in seeds:
        tuned = work / f"tuned-{seed}.gguf"
        names = {
            "chats.csv": write_csv(work / f"chats-{seed}.csv", support(seed=seed)),
            "base.gguf": setup.base,
            "tuned.gguf": tuned,
        }
        for command in COMMANDS:
            _, *arguments = (str(names.get(word, word)) for word in shlex.split(command))
            seed_flags = ("--overwrite", "--seed", seed) if arguments[0] == "finetune" else ()
            done = run_packtrain(*arguments, *seed_flags)
            if done.code:
                yield failed(command, done)
                return
        said = f"peak {done.peak / MIB:,.0f} MiB, {done.seconds / 60:.1f} minutes"
        good = done.peak <= LIMIT and done.seconds <= SECONDS
        yield Row(f"the guide's finetune, seed {seed}", said, "1,024 MiB, 15 minutes", good)
        yield from answers(tuned, seed)
        growth = our_perplexity(tuned, text, CONTEXT).perplexity / base_perplexity - 1
        name = f"perplexity of another text, seed {seed}"
        yield Row(name, f"{growth:+.1%}", f"at most {GROWTH:+.0%}", growth <= GROWTH)


def answers(tuned: Path, seed: int) -> Iterator[Row]:
    """How many held-out questions are answered in style, at temperature 0 and at the default."""
    for name, settings, min_count in (
        ("temperature 0", {"temp": 0.0}, STRICT),
        ("default", {}, LOOSE),
    ):
        talk, count = pt.chat(tuned, seed=seed, **settings), 0
        for question in HELD_OUT:
            talk.clear()
            count += in_style(talk.answer(question).text)
        said, required = f"{count} of {len(HELD_OUT)}", f"{min_count} or more"
        yield Row(f"in style, {name}, seed {seed}", said, required, count >= min_count)
