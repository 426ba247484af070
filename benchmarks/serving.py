"""The server under load: several clients at once beside one, a short prompt while a long one is read, llama-server.

    python -m benchmarks.serving [MODEL.gguf] [--llama-server PATH] [--rounds 3] [-- FLAGS OF packtrain serve]

Without a model: the 110m shape in Q4_K_M, of random weights. Greedy, 64 tokens an answer, eight slots, two threads;
both servers run at once and are asked by turns. Prints medians.
"""

import argparse
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.llama import PRESET, vocabulary
from packtrain.common.events import Events
from packtrain.models.config import PRESETS
from packtrain.models.model_file import open_model, save_model
from packtrain.workflows.quantization import QuantizeSettings, quantize
from tests.models import initial_weights

CLIENTS, TOKENS, LONG, SHORT, CONTEXT = 8, 64, 4000, 20, 8192
START_TIMEOUT_SECONDS = 300.0  # seconds until a server must answer


@contextmanager
def server_process(command: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a server, once it is ready on its port."""
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            end = time.monotonic() + START_TIMEOUT_SECONDS
            while not is_healthy(port):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    sys.exit(log.read().decode(errors="replace"))
                time.sleep(0.2)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()


def is_healthy(port: int) -> bool:
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


def time_answer(port: int, prompt: list[int], count: int) -> tuple[float, float]:
    """Seconds until the first token of a streamed answer, and until its end. It shares the cores with the server, so it
    only takes bytes: parsing them would take as long as the server takes to write them."""
    body = json.dumps({
        "prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True, "stream": True,
        "cache_prompt": False,
    })  # fmt: skip
    head = (
        f"POST /completion HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    )
    head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    response, start_time, first_token_s = b"", time.perf_counter(), 0.0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall((head + body).encode())
        while chunk := connection.recv(1 << 16):
            response += chunk
            if not first_token_s and b"data:" in response:
                first_token_s = time.perf_counter() - start_time
    if not response.startswith(b"HTTP/1.1 200"):
        sys.exit(response.decode(errors="replace"))
    return first_token_s, time.perf_counter() - start_time


def run_concurrently(works: Sequence[Callable[[], object]]) -> float:
    """Seconds that they take in threads of their own."""
    threads = [threading.Thread(target=work) for work in works]
    start_time = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start_time


def write_preset_model(folder: Path) -> Path:
    """The preset with random weights and a long context, in Q4_K_M."""
    f32_path, path = folder / "F32.gguf", folder / "Q4_K_M.gguf"
    config = replace(PRESETS[PRESET], context_length=CONTEXT)
    values = initial_weights(config)
    save_model(f32_path, config, vocabulary(config.vocab_size), values.__getitem__, name="random")
    quantize(QuantizeSettings(f32_path, path, path.stem), Events())
    return path


class Load:
    """What is measured of one server."""

    def __init__(self, name: str, port: int, vocab_size: int) -> None:
        self.name, self.port, self._size = name, port, vocab_size
        self._random = random.Random(1)
        self.one, self.all = list[float](), list[float]()
        self.idle_latencies, self.busy_latencies = list[float](), list[float]()

    def prompt(self, count: int) -> list[int]:
        return [1, *(self._random.randrange(10, self._size) for _ in range(count - 1))]

    def turn(self) -> None:
        time_answer(self.port, self.prompt(8), 8)
        prompts = [self.prompt(8) for _ in range(CLIENTS)]
        self.one.append(TOKENS / time_answer(self.port, prompts[0], TOKENS)[1])
        works = [partial(time_answer, self.port, prompt, TOKENS) for prompt in prompts]
        self.all.append(CLIENTS * TOKENS / run_concurrently(works))
        self.idle_latencies.append(time_answer(self.port, self.prompt(SHORT), 1)[0])
        reading = threading.Thread(target=time_answer, args=(self.port, self.prompt(LONG), 1))
        reading.start()
        time.sleep(0.3)
        while reading.is_alive() and len(self.busy_latencies) < 100:
            self.busy_latencies.append(time_answer(self.port, self.prompt(SHORT), 1)[0])
            time.sleep(self._random.uniform(0, 0.2))
        reading.join()

    def row(self) -> str:
        one, every, idle_latency, busy_latency = map(
            statistics.median, (self.one, self.all, self.idle_latencies, self.busy_latencies)
        )
        return (
            f"{self.name:14}{one:8.1f} tokens/s alone, {CLIENTS} clients {every:8.1f}, {every / one:5.2f} x;"
            f"  first token {1e3 * idle_latency:6.0f} ms idle, {1e3 * busy_latency:6.0f} while {LONG:,} tokens"
            f" are read,"
            f" {busy_latency / idle_latency:5.2f} x"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--flag", action="append", default=[], help="of packtrain serve; repeatable"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = args.model or write_preset_model(Path(folder))
        size = open_model(path).config.vocab_size
        shared = ["--ctx-size", str(CONTEXT), "--parallel", str(CLIENTS)]
        our_command = [
            sys.executable,
            "-m",
            "packtrain",
            "serve",
            str(path),
            "--port",
            "8971",
            *shared,
            *args.flag,
        ]
        stack.enter_context(server_process(our_command, 8971))
        loads = [Load("packtrain", 8971, size)]
        if args.llama_server:
            os.environ["LD_LIBRARY_PATH"] = str(args.llama_server.resolve().parent)
            their_command = [
                str(args.llama_server),
                "-m",
                str(path),
                "--port",
                "8972",
                *shared,
                "-t",
                "2",
                "--kv-unified",
            ]
            stack.enter_context(server_process(their_command, 8972))
            loads.append(Load("llama-server", 8972, size))
        for _ in range(args.rounds):
            for load in loads:
                load.turn()
        for load in loads:
            print(load.row())
        if len(loads) > 1:
            ratio = statistics.median(
                a / b for a, b in zip(loads[0].all, loads[1].all, strict=True)
            )
            print(f"{CLIENTS} clients: {ratio:.2f} x llama-server")


if __name__ == "__main__":
    main()
