"""Several processes, measured: python -m benchmarks.ranks overlap|predict [--mbit 100] [--preset 15m] …

overlap  two hosts (network namespaces) with a throttled link: how much of the exchange is hidden behind the backward
         pass, beside the most that could be: each bucket leaving as soon as it is complete, at the link's rate
predict  the step of 1, 2 and 4 processes, as `plan --nproc N --link RATE` predicts it and as it is; with more
         processes than cores, each is as much slower

`overlap` and `predict` with --mbit need Linux, root and iproute2. Only a quiet machine means anything.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packtrain.cli.main import main as packtrain
from packtrain.planner.rank_exchange import last_arrival_time
from packtrain.training import gradient_sums
from packtrain.training.monitoring import metrics_file
from tests.hosts import network_hosts
from tests.kill import sample_text
from tests.ranked import by_hand, run_checked

NUM_WARMUP_STEPS = 2  # steps that are not counted


def command(folder: Path, name: str, args: argparse.Namespace) -> list[str]:
    """A run of the preset; `-m benchmarks.ranks rank` writes down when buckets leave."""
    run_flags = [
        "--preset",
        args.preset,
        "--vocab-size",
        "auto",
        "-c",
        args.ctx,
        "--warmup-ratio",
        0,
    ]
    run_flags += ["--batch-size", args.rows, "--iters", args.steps, "--val-split", 0, "-t", 1]
    files = ["--data", folder / "text.txt", "-o", folder / f"{name}.gguf", "--overwrite"]
    start = [sys.executable, "-m", "benchmarks.ranks", "rank", "train"]
    return [*start, *map(str, [*files, *run_flags, "--no-tensorboard"])]


def rank(arguments: Sequence[str]) -> int:
    """A run as packtrain carries it out, with a line for each step in $TIMES: when buckets left, and all were there."""
    leaving, end, start_time = (
        gradient_sums.GradientExchange.make_sender,
        gradient_sums.GradientExchange.finish_step,
        [0.0],
    )
    sent_buckets = list[tuple[float, int]]()

    def noted_leaving(self: gradient_sums.GradientExchange) -> Any:
        start_time[0], send = time.perf_counter(), leaving(self)
        sent_buckets.clear()

        def noted() -> bool:
            num_sent = self.num_sent
            send()
            now = time.perf_counter() - start_time[0]
            for _, bucket in self.buckets[num_sent : self.num_sent]:
                sent_buckets.append((now, sum(t.spec.size for t in bucket)))
            return False

        return noted

    def noted_end(self: gradient_sums.GradientExchange, loss: Any) -> None:
        now = time.perf_counter() - start_time[0]
        for _, bucket in self.buckets[self.num_sent :]:
            sent_buckets.append((now, sum(t.spec.size for t in bucket)))
        end(self, loss)
        arrived = time.perf_counter() - start_time[0]
        with open(os.environ["TIMES"] + os.environ.get("RANK", "0"), "a") as file:
            print(
                json.dumps({"sent": sent_buckets, "computed": now, "arrived": arrived}), file=file
            )

    gradient_sums.GradientExchange.make_sender = noted_leaving  # type: ignore[method-assign]
    gradient_sums.GradientExchange.finish_step = noted_end  # type: ignore[method-assign]
    return packtrain(arguments)


def overlap(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as tmp_folder, network_hosts(2) as two:
        folder = Path(tmp_folder)
        (folder / "text.txt").write_text(sample_text(400_000))
        two.throttle(args.mbit)
        os.environ["TIMES"] = str(folder / "times")
        wait_for_all(by_hand(command(folder, "run", args), [], [], on=two))
        lines = (folder / "times0").read_text().splitlines()[NUM_WARMUP_STEPS:]
    hidden_times = [hidden_seconds(json.loads(line), args.mbit * 1e6 / 8) for line in lines]
    for name in ("computed", "exchanged", "waited", "least", "share"):
        print(f"{name:10} {statistics.median(times[name] for times in hidden_times):.3f}")


def hidden_seconds(step: dict[str, Any], link: float) -> dict[str, float]:
    """Seconds of a step until its backward pass was done, of the exchange at the link's rate, of waiting for it, and of
    the least possible waiting; and the share of what could be hidden that was."""
    durations = [
        4 * numbers / link for _, numbers in step["sent"]
    ]  # of two ranks, each sends as much
    exchanged = sum(durations)
    min_exposed = max(
        last_arrival_time([at for at, _ in step["sent"]], durations) - step["computed"], 0
    )
    waited = step["arrived"] - step["computed"]
    share = (exchanged - waited) / (exchanged - min_exposed)
    times = {"computed": step["computed"], "exchanged": exchanged, "waited": waited}
    return times | {"least": min_exposed, "share": share}


def wait_for_all(started: list["subprocess.Popen[str]"]) -> None:
    for process in started:
        said = process.communicate()[1]
        if process.returncode:
            raise SystemExit(said)


def predict(args: argparse.Namespace) -> None:
    print("processes  link       predicted  measured  ratio")
    with tempfile.TemporaryDirectory() as tmp_folder:
        folder = Path(tmp_folder)
        (folder / "text.txt").write_text(sample_text(400_000))
        os.environ["TIMES"] = str(folder / "times")
        predicted([*command(folder, "now", args), "--measure-speed"], 1)  # as the machine is now
        for ranks in map(int, args.ranks.split(",")):
            for mbit in (args.mbit, None) if ranks > 1 and args.mbit else (None,):
                name = f"{ranks}-{mbit}"
                argv = command(folder, name, args)
                if mbit is None:
                    run_checked([*argv, "--nproc", str(ranks)])
                else:
                    with network_hosts(ranks) as rank_hosts:
                        rank_hosts.throttle(mbit)
                        wait_for_all(by_hand(argv, *[[]] * ranks, on=rank_hosts))
                step_seconds = median_step_seconds(folder / f"{name}.run")
                expected = predicted(argv, ranks, mbit or 20_000)
                link = f"{mbit or 'loopback'}"
                print(
                    f"{ranks:9}  {link:9}  {expected:9.3f}  {step_seconds:8.3f}  {step_seconds / expected:5.2f}"
                )


def median_step_seconds(folder: Path) -> float:
    end_times = [r["seconds"] for r in metrics_file.read(folder / "metrics.jsonl") if "loss" in r]
    return statistics.median(
        b - a
        for a, b in zip(
            end_times[NUM_WARMUP_STEPS:], end_times[NUM_WARMUP_STEPS + 1 :], strict=False
        )
    )


def predicted(argv: list[str], ranks: int, mbit: float = 0.0) -> float:
    flags = ["--nproc", str(ranks), "--link", f"{mbit:g}Mbit"] if ranks > 1 else []
    start = [sys.executable, "-m", "packtrain", "plan"]
    said = subprocess.run([*start, *argv[4:], *flags], capture_output=True, text=True, check=True)
    line = next(x for x in said.stdout.splitlines()[::-1] if " s a step" in x)
    return float(line.partition(" s a step")[0].split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["overlap", "predict"])
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--preset", default="15m")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--ctx", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ranks", default="1,2,4")
    args = parser.parse_args()
    {"overlap": overlap, "predict": predict}[args.what](args)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        sys.exit(rank(sys.argv[2:]))
    main()
