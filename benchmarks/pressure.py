"""Commands under pressure, watched from outside: long rows, odd files, hostile requests, with little --memory.

Cases for `python -m benchmarks.budget --pressure N`: each is a command with a budget, on data that few would wish for,
without tokens in the cache. It must stay within its budget with its children, end with code 0, 2 or 3 and without a
traceback; where it is refused with a size that would do, that size must run.
"""

import gzip
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from benchmarks.watched import private_nbytes_of, run_watched
from packtrain.common.memory import parse_size
from packtrain.kernels.runtime.environment import cache_root
from packtrain.models.model_file import open_model
from tests.adapters import random_adapter
from tests.architectures import random_model
from tests.hostile_requests import BODY, Ask
from tests.servers import serve_process

MIB = 1 << 20
MIN_MEMORY_RE = re.compile(
    r"(?:would do is about|would do is|needs at least|give --memory) (\d+MiB)"
)
WORDS = "the cat", "a dog", "sat on", "some mat", "and saw", "one bird.\n"
LENGTHS = 10, 300, 30_000, 900_000, 4_000_000  # characters of a row
SHARES = 8, 8, 8, 3, 1  # how often each is drawn: the longest take a minute or more
SIZES = 60, 90, 100, 130, 200, 300


def random_words(rng: random.Random, length: int) -> str:
    if rng.random() < 0.3:  # without a place to cut
        return "".join(rng.choices("abcdefgh", k=length))
    return " ".join(rng.choices(WORDS, k=length // 6 + 1))[:length]


def rows(rng: random.Random, folder: Path) -> Path:
    """A file of a few rows, one of which may be very long."""
    texts = [
        random_words(rng, length) for length in rng.choices(LENGTHS, SHARES, k=rng.randint(1, 4))
    ] + ["a b c"] * 50
    records = [{"prompt": "say", "completion": text} for text in texts]
    rng.shuffle(records)
    name = rng.choice(("a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz"))
    lines = map(json.dumps, records)
    text = f"[{','.join(lines)}]" if ".json" in name and "jsonl" not in name else "\n".join(lines)
    return written(folder / name, text)


def text(rng: random.Random, folder: Path) -> Path:
    name = rng.choice(("a.txt", "a.txt.gz"))
    (length,) = rng.choices(LENGTHS[2:], SHARES[2:])
    return written(folder / name, f"{random_words(rng, length)}\n{random_words(rng, 20_000)}")


def broken_file(rng: random.Random, folder: Path) -> Path:
    """A file that is none, or a row of 100 MB."""
    path = folder / "a.jsonl.gz"
    if rng.random() < 0.5:
        path = path.with_suffix("")
        with open(path, "wb") as file:
            file.truncate(rng.choice((1, 200 * MIB)))
        return path
    with gzip.open(path, "wb", 1) as file:
        file.write(b'{"text": "' + b"the dog " * (100 * MIB // 8) + b'"}')
    return path


def written(path: Path, text: str) -> Path:
    raw = text.encode()
    path.write_bytes(gzip.compress(raw, 1) if path.suffix == ".gz" else raw)
    return path


def command(rng: random.Random, folder: Path, base: Path, adapter: Path) -> list[str]:
    """A command that reads data within a budget."""
    output = ["-o", str(folder / "out.gguf"), "--overwrite"]
    steps = ["--iters", "1", "--no-tensorboard", "--check-answers", "0"]
    kind = rng.choice((
        "finetune", "finetune", "train", "plan", "imatrix", "quantize", "merge", "choose", "eval"
    ))  # fmt: skip
    if kind == "train":
        steps = [*steps[:3], "--preset", "1m", "--vocab-size", "300", "--ctx", "64"]
        return [kind, "--data", str(text(rng, folder)), *steps, *output]
    data = str(rng.choice((rows, rows, text, broken_file))(rng, folder))
    if kind == "finetune":
        return [kind, str(base), "--data", data, "--ctx", "128", *steps, *output]
    if kind == "plan":
        return [kind, "finetune", str(base), "--data", data, "--ctx", "128", *steps, *output]
    if kind == "eval":
        return [kind, str(base), "--data", data, "--ctx", "64"]
    if kind == "imatrix":
        return [kind, str(base), "--data", data, "--tokens", "2000", *output]
    if kind == "merge":
        return [kind, str(base), str(adapter), "--calibrate", data, *output]
    if kind == "choose":
        chosen = ["--type", "q4_0", "--type", "q8_0", "--data", data, "--calibrate", data]
        return [kind, str(base), str(adapter), *chosen, *output[:2]]
    return [kind, str(base), output[1], "Q4_0", "--calibrate", data, "--overwrite"]


def run_case(
    flags: list[str], memory: str, variables: dict[str, str], retry: bool = True
) -> list[str]:
    """What was wrong with a command and its budget, and with the one that its refusal names."""
    done = run_watched(
        sys.executable, "-m", "packtrain", *flags, "--memory", memory, variables=variables
    )
    wrong, last = list[str](), done.said.strip()[-300:]
    if done.peak > parse_size(memory, ""):
        wrong.append(f"peak {done.peak / MIB:.0f} MiB of {memory}: {flags}: {last}")
    if done.code not in (0, 2, 3) or "Traceback" in done.said:
        wrong.append(f"exit {done.code} with {memory}: {flags}: {last}")
    named = MIN_MEMORY_RE.search(done.said) if done.code == 3 else None
    if named and retry:
        wrong += run_case(flags, named[1], variables, False)
    elif done.code == 3:
        wrong.append(
            f"refused with {memory}, "
            + ("as named" if not retry else "without a size")
            + f": {flags}: {last}"
        )
    return wrong


def request(rng: random.Random) -> Ask:
    logit_bias = [[n % 290, rng.random()] for n in range(rng.choice((10, 10_000)))]
    extra_fields = rng.choice((
        {"logit_bias": logit_bias}, {"prompt": random_words(rng, rng.choice((10, 900_000)))},
        {"stop": ["a" * rng.randint(1, 10_000)]},
        {"dry_multiplier": 1, "dry_sequence_breakers": [random_words(rng, 9) for _ in range(64)]},
        {"tools": [{"type": "function", "function": {"name": f"f{rng.random()}" + "n" * 3000}}]},
        {"samplers": "top_k;" + " " * rng.randint(1, 900_000)},
    ))  # fmt: skip
    body = json.dumps(BODY | extra_fields).encode() if rng.random() < 0.95 else b" " * (10 * MIB)
    return Ask("POST", rng.choice(("/completion", "/v1/chat/completions")), body)


def served(rng: random.Random, base: Path, requests: int = 60) -> list[str]:
    """A server with hardly more than the least with which it starts."""
    command = sys.executable, "-m", "packtrain", "serve", base, "--port", "0", "--ctx", "512"
    refused = run_watched(*command, "--memory", "100MiB").said
    min_mib = max(float(size) for size in re.findall(r"([\d.]+) MiB", refused))
    wrong, peak, done = list[str](), [0], threading.Event()
    with serve_process(base, "--ctx", "512", "--memory", f"{min_mib:.1f}MiB") as server:

        def watch() -> None:
            while not done.wait(0.005):
                peak[0] = max(peak[0], private_nbytes_of(server.process.pid))

        def client(seed: int) -> None:
            request_rng = random.Random(seed)
            for _ in range(requests // 4):
                ask = request(request_rng)
                try:
                    status, _, body = server.ask(ask)
                except OSError as error:
                    wrong.append(f"{ask.path} with {len(ask.body)} bytes: {error!r}")
                    continue
                if status == 500 or (status >= 400 and not json.loads(body)["error"]["message"]):
                    wrong.append(f"{ask.path}: {status} {body[:200]!r}")

        threads = [threading.Thread(target=client, args=(rng.random(),)) for _ in range(4)]
        for thread in (watcher := threading.Thread(target=watch), *threads):
            thread.start()
        for thread in threads:
            thread.join()
        done.set()
        watcher.join()
    if peak[0] > min_mib * MIB:
        wrong.append(f"serve: peak {peak[0] / MIB:.1f} MiB of {min_mib}")
    return wrong


def run_cases(count: int, seed: int, folder: Path, report: Callable[[str], None]) -> int:
    """Run so many cases; how many were wrong. Every tenth is a server, every thirtieth compiles its kernels anew."""
    base, adapter, cache = (
        folder / "base.gguf", folder / "adapter.gguf", folder / "cache/packtrain"
    )  # fmt: skip
    random_model(base, "llama")
    random_adapter(adapter, open_model(base))
    cache.mkdir(parents=True)
    cache_root().mkdir(parents=True, exist_ok=True)
    for entry in cache_root().iterdir():  # kernels, and what was measured of them, but no tokens
        if entry.name != "tokens":
            (cache / entry.name).symlink_to(entry)
    faults = 0
    for number in range(count):
        rng, start_time = random.Random(seed + number), time.monotonic()
        place = folder / str(number)
        place.mkdir()
        if number % 10 == 9:
            wrong, description = served(rng, base), "serve"
        else:
            flags, memory = command(rng, place, base, adapter), f"{rng.choice(SIZES)}MiB"
            is_cold = number % 30 == 15
            home = place if is_cold else cache.parent
            wrong = run_case(flags, memory, {"XDG_CACHE_HOME": str(home)})
            description = f"{flags[0]} {memory}{', no kernels compiled' * is_cold}"
        faults += bool(wrong)
        report(
            f"{number}: {description}, {time.monotonic() - start_time:.0f} s: {'; '.join(wrong) or 'ok'}"
        )
        with suppress(OSError):
            subprocess.run(["rm", "-rf", place], check=False)
    return faults
