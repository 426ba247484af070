"""Hostile files in great numbers: python -m benchmarks.fuzz [--headers 1000000] [--files 10000] [--seed 0]

headers  changed headers of every kind of value and tensor, through GGUF
files    changed model files of every architecture: inspected, opened, one token generated, quantized, and a message
         through the chat template

A child works, so that one that dies is seen, with the seed that did it. Prints how many of each outcome there were
and every fault; exit code 1 if there is one. `--only SEED` says what becomes of one file, with the traceback.
"""

import argparse
import contextlib
import io
import multiprocessing
import os
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing.queues import SimpleQueue
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from packtrain.cli import generate, inspect, quantize
from packtrain.data.chat_template import ChatTemplate, template_source
from packtrain.gguf import GGUF
from packtrain.models.model_file import open_model
from packtrain.workflows.quantization import QuantizeSettings
from packtrain.workflows.text_generation import GenerateSettings
from tests import fuzz
from tests.hostile import header_draft, model_drafts

MIB = 2**20
TEMPLATE_SECONDS = 5.0
BATCH, HEADER_NBYTES, FILE_NBYTES = 500, 32 * MIB, 256 * MIB
Done = tuple[
    Counter[str], list[tuple[int, str]], float
]  # outcomes, faults by seed, seconds of the slowest


def use_header(path: Path) -> None:
    gguf = GGUF(path)
    for name in gguf.entries:
        gguf.array(name)


def use_file(path: Path) -> None:
    """All that a user would do with a model; what is printed is left out."""
    output = path.with_name("quantized.gguf")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        inspect.run(inspect.InspectSettings(path, tensors=True))
        inspect.run(inspect.InspectSettings(path, json=True))
        model = open_model(path)
        tokenizer = model.tokenizer()
        source = template_source(model.gguf.metadata)
        generate.run(GenerateSettings(path, prompt="the cat", n_predict=1, temp=0.0))
        quantize.run(QuantizeSettings(path, output, "Q8_0", overwrite=True, allow_requantize=True))
        if source is not None:
            template = ChatTemplate(source, seconds=TEMPLATE_SECONDS)
            tokenizer.encode(template.render([{"role": "user", "content": "the cat"}]))


USES: dict[str, Callable[[Path], None]] = {"headers": use_header, "files": use_file}


def drafts(kind: str, folder: Path) -> list[fuzz.Draft]:
    """The files that are changed; each has been used once, so that its kernels are there."""
    if kind == "headers":
        return [header_draft(folder)]
    return model_drafts(folder)


def work(
    kind: str, seeds: Iterable[int], at: "Synchronized[int]", results: "SimpleQueue[Done]"
) -> None:
    """Judge the files of these seeds; what is found goes out batch by batch, the seed at hand is always known."""
    use, outcomes, faults, slowest = USES[kind], Counter[str](), list[tuple[int, str]](), 0.0
    batch, max_nbytes = (BATCH, HEADER_NBYTES) if kind == "headers" else (1, FILE_NBYTES)
    with tempfile.TemporaryDirectory(dir=fastest()) as folder:
        seed_drafts, path, remaining = (
            drafts(kind, Path(folder)),
            Path(folder) / "hostile.gguf",
            [*seeds],
        )
        for draft in seed_drafts:
            path.write_bytes(draft.encode())
            use(path)
        while remaining:
            now, remaining = remaining[:batch], remaining[batch:]
            with fuzz.limit_resources(max_nbytes):
                for seed in now:
                    at.value = seed
                    start_time = time.perf_counter()
                    path.write_bytes(fuzz.hostile_bytes(seed_drafts[seed % len(seed_drafts)], seed))
                    try:
                        outcomes[fuzz.judge_file(use, path)] += 1
                    except fuzz.Fault as fault:
                        faults.append((seed, str(fault)))
                    slowest = max(slowest, time.perf_counter() - start_time)
            if len(remaining) % 10_000 < batch:
                results.put((outcomes, faults, slowest))
                outcomes, faults = Counter(), []


def fastest() -> str:
    """A folder in memory if there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def run(kind: str, first_seed: int, count: int) -> int:
    """Print what became of so many files; the number of faults."""
    context = multiprocessing.get_context("spawn")
    at, start_time, seed, slowest = (
        context.Value("q", first_seed),
        time.monotonic(),
        first_seed,
        0.0,
    )
    counts, faults = Counter[str](), list[tuple[int, str]]()
    while seed < first_seed + count:
        results: SimpleQueue[Done] = context.SimpleQueue()
        child = context.Process(
            target=work, args=(kind, range(seed, first_seed + count), at, results)
        )
        child.start()
        while child.is_alive() or not results.empty():
            if results.empty():
                child.join(0.1)
                continue
            new_outcomes, new_faults, new_slowest = results.get()
            counts, faults, slowest = (
                counts + new_outcomes,
                faults + new_faults,
                max(slowest, new_slowest),
            )
        seed = first_seed + count
        if child.exitcode:
            seed = at.value + 1
            faults.append((at.value, f"the process ended with {child.exitcode}"))
    minutes = (time.monotonic() - start_time) / 60
    outcomes = ", ".join(f"{number:,} {label}" for label, number in counts.most_common())
    print(f"{count:,} {kind} from seed {first_seed}: {outcomes}; {len(faults)} faults", end="")
    print(f" ({minutes:.1f} minutes, the slowest {slowest:.2f} s)")
    for number, label in faults[:100]:
        print(f"  seed {number}: {label}")
    return len(faults)


def show(kind: str, seed: int) -> None:
    """One file, with where its error came from."""
    with tempfile.TemporaryDirectory() as folder:
        seed_drafts, path = drafts(kind, Path(folder)), Path(folder) / "hostile.gguf"
        path.write_bytes(fuzz.hostile_bytes(seed_drafts[seed % len(seed_drafts)], seed))
        try:
            USES[kind](path)
        except Exception:
            traceback.print_exc()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--headers", type=int, default=20_000)
    parser.add_argument("--files", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="show what becomes of the file of this seed")
    args = parser.parse_args()
    if args.only is not None:
        show("headers" if args.files == 0 else "files", args.only)
        return 0
    faults = sum(run(kind, args.seed, getattr(args, kind)) for kind in USES if getattr(args, kind))
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
