"""Whether finetune's defaults are near the best settings: python -m benchmarks.tuning_defaults BASE.gguf …

For each base and each of four small data sets (a support desk's style, a persona, GSM8K, tool calls): LoRA runs with
the default learning rate and length, and with learning rates and lengths around them. Printed is the held-out gain, the
validation loss of the base less that of the tuned model in nats per token, as a mean over seeds, and what share of the
best setting's gain the default has. Results are kept in a JSON Lines file, so that a second call adds what is missing.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import packtrain as pt
from benchmarks.tuning_data import Row, persona, support

CHAT = Path(__file__).parent.parent.parent / "shared/data/chat"
RATES, LENGTHS = (0.5, 1.0, 2.0), (1.0, 2.0)  # factors of the defaults


@dataclass(frozen=True)
class Setting:
    rate: float = 1.0
    length: float = 1.0

    def __str__(self) -> str:
        return f"lr × {self.rate:g}, epochs × {self.length:g}"


def gsm8k() -> list[Row]:
    return lines(CHAT / "gsm8k_train.jsonl")[:100]


def tool_calls() -> list[Row]:
    rows: list[Row] = json.loads((CHAT / "glaive_toolcall_en_demo.json").read_text())
    return rows[:72]


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# name: rows, how many are trained on, further settings
DATA = {
    "style": (lambda: support(126), 82, {}),
    "persona": (lambda: persona(100), 64, {}),
    "gsm8k": (gsm8k, 60, {}),
    "tools": (tool_calls, 48, {"ctx": 512}),
}


def folder_of(name: str, home: Path) -> Path:
    rows, count, _ = DATA[name]
    folder = home / name
    folder.mkdir(exist_ok=True)
    for part, of in (("train", rows()[:count]), ("valid", rows()[count:])):
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of))
    return folder


def run(
    base: Path, name: str, setting: Setting, seed: int, home: Path, precision: str
) -> dict[str, Any]:
    """One tune without a merge: validation losses before and after, updates, epochs, learning rate."""
    data, data_options = folder_of(name, home), DATA[name][2]
    common_options = dict[str, Any](
        output=home / "tuned.gguf", merge="none", overwrite=True, seed=seed, val_batches=0,
        tensorboard=False, precision=precision, **data_options,
    )  # fmt: skip
    settings = pt.plan(pt.finetune, base, data, **common_options).job.settings
    assert settings.lr is not None and settings.epochs is not None
    changed = {
        "lr": settings.lr * setting.rate,
        "epochs": settings.epochs * setting.length,
        "batch_size": settings.batch_size,
    }
    done = pt.finetune(base, data, **common_options, **changed, steps_per_eval=0)
    progress = done.progress
    return {
        "base": base.name, "data": name, "rate": setting.rate, "length": setting.length, "seed": seed,
        "before": progress.base, "after": progress.last, "updates": progress.step,
        "seconds": round(progress.seconds, 1), **changed,
    }  # fmt: skip


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    yield "| base | data | updates | lr | gain of the default | best setting | its gain | default / best |"
    yield "|---|---|---|---|---|---|---|---|"
    pairs = dict.fromkeys((r["base"], r["data"]) for r in results)
    for base, data in pairs:
        every: dict[Setting, list[dict[str, Any]]] = {}
        for r in results:
            if (r["base"], r["data"]) == (base, data):
                every.setdefault(Setting(r["rate"], r["length"]), []).append(r)
        gains = {s: [r["before"] - r["after"] for r in rows] for s, rows in every.items()}
        if Setting() not in gains:
            continue
        best = max(gains, key=lambda s: statistics.fmean(gains[s]))
        first, default_gain = every[Setting()][0], statistics.fmean(gains[Setting()])
        yield (
            f"| {base} | {data} | {first['updates']} | {first['lr']:.1e} | {text(gains[Setting()])} | {best} "
            f"| {text(gains[best])} | {default_gain / statistics.fmean(gains[best]):.3f} |"
        )


def text(values: list[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.4f} ± {error:.4f} ({len(values)})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("bases", nargs="*", type=Path)
    parser.add_argument("--data", default=",".join(DATA))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rates", default=",".join(map(str, RATES)), help="factors of the default")
    parser.add_argument(
        "--lengths", default=",".join(map(str, LENGTHS)), help="factors of the default"
    )
    parser.add_argument("--precision", default="f32")
    parser.add_argument("--results", type=Path, default=Path("build/tuning_defaults.jsonl"))
    args = parser.parse_args()
    grid = [
        Setting(float(r), float(n)) for r in args.rates.split(",") for n in args.lengths.split(",")
    ]
    args.results.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            for base in args.bases:
                for name in args.data.split(","):
                    for setting in grid:
                        mark = (base.name, name, setting.rate, setting.length, seed)
                        keys = ("base", "data", "rate", "length", "seed")
                        if any(tuple(r[k] for k in keys) == mark for r in lines(args.results)):
                            continue
                        result = run(base, name, setting, seed, Path(folder), args.precision)
                        with args.results.open("a") as file:
                            file.write(json.dumps(result) + "\n")
                        print(json.dumps(result), flush=True)
    print(f"{platform.machine()}, {os.cpu_count()} cores\n")
    print("\n".join(table(lines(args.results))))


if __name__ == "__main__":
    main()
