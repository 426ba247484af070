"""What packtrain promises, seen on a real base, as a table: python -m benchmarks.real [--parts first,eval] [--short]

    first     inspect, generate and chat answer
    style     the guide's commands, as they stand, on a made-up support desk: answers in its style with three seeds
    eval      perplexity of a text in windows, as llama-perplexity finds it
    memory    finetune inside 1 GiB, 700 MiB and its smallest budget, children counted, kernels compiled and not
    tune8     8 steps: validation falls, and the merged file, as large as the base, keeps what the adapter learnt on
              conversations that neither a step nor the merge saw
    tune60    the same with 60 steps
    tutorial  the same with the tutorial's own base in Q8_0 and Q4_K_M
    llama     the merged files in llama.cpp answer as here
    resume    a run that is killed and resumed equals one left alone, bit for bit

Each part is independent, but `llama` takes the files that `tune8` and `tune60` left. Results are kept in a JSON file
beside the base, so that parts can be run one by one; the table shows all that are there. Exit code 1 if a row is not
as it should be.
"""

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.first_tune import style
from benchmarks.real_base import (
    Row,
    Setup,
    first_reply_rows,
    llama_rows,
    memory_rows,
    perplexity_rows,
    resume_rows,
    tune_few,
    tune_many,
    tutorial_rows,
)
from tests.real import BASE

ROOT = Path(__file__).parent.parent
PARTS: dict[str, Callable[[Setup], Iterator[Row]]] = {
    "first": first_reply_rows,
    "style": style,
    "eval": perplexity_rows,
    "memory": memory_rows,
    "tune8": tune_few,
    "tune60": tune_many,
    "tutorial": tutorial_rows,
    "llama": llama_rows,
    "resume": resume_rows,
}
HEADING = "| part | what | found | wanted | |\n|---|---|---|---|---|"


def table(results: dict[str, list[Row]]) -> str:
    return "\n".join(
        [HEADING, *(f"| {part} {row}" for part, rows in results.items() for row in rows)]
    )


def read(path: Path) -> dict[str, list[Row]]:
    """The results of earlier runs."""
    saved = json.loads(path.read_text()) if path.exists() else {}
    return {part: [Row(**row) for row in saved[part]] for part in PARTS if part in saved}


def write(path: Path, results: dict[str, list[Row]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    serialized = {part: [asdict(row) for row in rows] for part, rows in results.items()}
    path.write_text(json.dumps(serialized, indent=1))


def rows(part: str, setup: Setup) -> Iterator[Row]:
    """A part's rows; one that cannot go on says why, and the others run all the same."""
    try:
        yield from PARTS[part](setup)
    except (SystemExit, AssertionError, OSError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        yield Row("the whole part", lines[-1].replace("|", "/")[:160], "to end", False)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--base", type=Path, default=BASE, help="the base, a GGUF file")
    parser.add_argument("--data", type=Path, required=True, help="conversations, one to a line")
    parser.add_argument("--text", type=Path, required=True, help="whose perplexity is compared")
    parser.add_argument("--stories", type=Path, help="what the tutorial's base is trained on")
    parser.add_argument("--llama", type=Path, default=ROOT / "build/llama",
                        help="where `make conformance` has built llama.cpp")  # fmt: skip
    parser.add_argument("--work", type=Path, default=ROOT / "build/real/work")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--short", action="store_true", help="small, in a minute or two")
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    for name in ("base", "data", "text", "stories"):
        path = getattr(args, name)
        if path is not None and not path.exists():
            parser.error(f"--{name}: there is no {path}")
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"--parts: {unknown[0]!r} is none of {', '.join(PARTS)}")
    if "tutorial" in args.parts and not args.stories:
        parser.error("--stories: the part tutorial needs a text to train its base on")
    return args


def main() -> int:
    args = parsed()
    setup = Setup(args.base, args.data, args.text, args.stories, args.llama, args.work, args.short)
    file = args.work / ("short.json" if args.short else "results.json")
    results = read(file)
    for part in args.parts:
        print(f"… {part}", file=sys.stderr, flush=True)
        results[part] = []
        for row in rows(part, setup):
            results[part].append(row)
            print(f"| {part} {row}", file=sys.stderr, flush=True)
        write(file, results)
    print(
        f"{args.base.name}, {platform.machine()}, {os.cpu_count()} cores, {datetime.date.today()}\n"
    )
    print(table({part: results[part] for part in PARTS if part in results}))
    return 0 if all(row.is_good for part in args.parts for row in results[part]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
