"""How the server ends: killed while it saves slots, by one signal while it answers, and by a second one."""

import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from packtrain.common.files import remove_temp_files
from tests.architectures import random_model

NUM_PARTIAL_KILLS, MAX_KILLS, READY_SECONDS = (
    3,
    30,
    120.0,
)  # kills while a file is written, kills at most, seconds
ENDLESS = {"prompt": "the a", "ignore_eos": True, "stream": True, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ends") / "m.gguf"
    random_model(path, "llama")
    return path


class ServerProcess:
    """A server from its beginning to its end, and the port it listens on."""

    def __init__(self, model: Path, port: int = 0, *flags: str) -> None:
        command = [sys.executable, "-m", "packtrain", "serve", str(model), "--port", str(port)]
        command += ["--ctx", "8192", "--chat-template", "chatml", *flags]
        self._log = model.with_name(f"{random.getrandbits(60)}.log")
        with open(self._log, "wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out)
        self._connections = list[http.client.HTTPConnection]()
        end, self.port = time.monotonic() + READY_SECONDS, 0
        while not self.port:
            assert self.process.poll() is None and time.monotonic() < end, self.said
            match = re.search(r"listening on http://[^ ]*:(\d+)", self.said)
            self.port = int(match[1]) if match else 0
            time.sleep(0.02)

    @property
    def said(self) -> str:
        return self._log.read_text()

    def post_request(self, path: str, body: Any) -> http.client.HTTPResponse:
        return self.start_request(path, body).getresponse()

    def start_request(
        self, path: str, body: Any, num_missing: int = 0
    ) -> http.client.HTTPConnection:
        """A request, but for so many bytes of its body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        self._connections.append(connection)
        text = json.dumps(body).encode()
        headers = {"Content-Length": str(len(text))}
        connection.request("POST", path, text[: len(text) - num_missing], headers)
        return connection

    def post_json(self, path: str, body: Any) -> Any:
        answer = self.post_request(path, body)
        response = json.loads(answer.read())
        assert answer.status == 200, response
        return response

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for connection in self._connections:
            connection.close()

    def check_exit(self, seconds: float) -> None:
        """Raise AssertionError unless it ends well, within so many seconds."""
        assert self.process.wait(seconds) == 0, self.said
        assert "Traceback" not in self.said and "Error" not in self.said, self.said


@contextmanager
def running_server(model: Path, *arguments: Any) -> Iterator[ServerProcess]:
    life = ServerProcess(model, *arguments)
    try:
        yield life
    finally:
        life.close()


def fill_slot(life: ServerProcess, slot: int) -> None:
    """Slots 0 and 1 of each life know the same two texts."""
    prompt = [1, *(40 + (n * (slot + 2)) % 90 for n in range(1000 + 900 * slot))]
    life.post_json(
        "/completion", {"prompt": prompt, "n_predict": 1, "id_slot": slot, "temperature": 0}
    )


def save_slot(life: ServerProcess, slot: int, name: str) -> None:
    life.post_json(f"/slots/{slot}?action=save", {"filename": name})


def save_in_turns(life: ServerProcess) -> None:
    """Until the server is gone."""
    with suppress(OSError, http.client.HTTPException):
        while True:
            for slot in (0, 1):
                save_slot(life, slot, "s.bin")


def test_a_kill_while_a_slot_is_saved_leaves_the_old_file_or_the_new_one(
    model: Path, tmp_path: Path
) -> None:
    kills, seen, num_partial = 0, set[int](), 0
    flags = 0, "--slot-save-path", str(tmp_path)
    with running_server(model, *flags) as life:
        for slot in (0, 1):
            fill_slot(life, slot)
            save_slot(life, slot, f"{slot}.bin")
        save_slot(life, 0, "s.bin")
    slot_files = [(tmp_path / f"{slot}.bin").read_bytes() for slot in (0, 1)]
    while num_partial < NUM_PARTIAL_KILLS and kills < MAX_KILLS:
        with running_server(model, *flags) as life:
            assert not [*tmp_path.glob(".*")]  # what the last one left is removed
            slot = slot_files.index((tmp_path / "s.bin").read_bytes())
            restored = life.post_json(f"/slots/{slot}?action=restore", {"filename": "s.bin"})
            assert restored["n_restored"] == 1001 + 900 * slot
            fill_slot(life, 1 - slot)
            save_slot(life, 1 - slot, "s.bin")
            thread = threading.Thread(target=save_in_turns, args=(life,))
            thread.start()
            end = time.monotonic() + READY_SECONDS
            while not [*tmp_path.glob(".*.part")]:
                assert time.monotonic() < end, life.said
            life.process.send_signal(signal.SIGKILL)
            thread.join()
        seen.add(slot_files.index((tmp_path / "s.bin").read_bytes()))
        kills, num_partial = kills + 1, num_partial + bool([*tmp_path.glob(".*.part")])
    assert seen == {0, 1} and num_partial == NUM_PARTIAL_KILLS, (
        f"{num_partial} of {kills} kills came while a file was written"
    )


def test_temporary_files_are_no_slots(model: Path, tmp_path: Path) -> None:
    mine, gone = f".s.bin.{os.getpid()}.part", ".s.bin.999999999.part"
    with running_server(model, 0, "--slot-save-path", str(tmp_path)) as life:
        fill_slot(life, 0)
        save_slot(life, 0, "s.bin")
        for name in (mine, gone):
            (tmp_path / name).write_bytes((tmp_path / "s.bin").read_bytes())
        (tmp_path / "link").symlink_to(tmp_path / "s.bin")
        (tmp_path / "folder").mkdir()
        os.mkfifo(tmp_path / "pipe")
        for name in (mine, gone, "link", "folder", "pipe"):
            for action in ("save", "restore"):
                answer = life.post_request(f"/slots/0?action={action}", {"filename": name})
                assert answer.status == 400, name
    remove_temp_files(tmp_path)
    assert (tmp_path / mine).exists() and not (tmp_path / gone).exists()


def test_running_answers_finish_after_a_signal_and_the_port_is_free_at_once(model: Path) -> None:
    with running_server(model) as life:
        answer = life.post_request("/completion", ENDLESS | {"n_predict": 1500})
        answer.read1(20)
        life.process.terminate()
        while "stopping: " not in life.said:
            time.sleep(0.01)
        with running_server(model, life.port) as another:
            assert another.post_json("/completion", {"prompt": "the a", "n_predict": 1})["stop"]
        events = answer.read().split(b"\n\n")
        assert b'"tokens_predicted": 1500' in events[-2], events[-2]
        life.check_exit(20)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_answers_which_say_so(model: Path, second: signal.Signals) -> None:
    with running_server(model) as life:
        answer = life.post_request("/completion", ENDLESS)
        answer.read1(20)
        life.start_request("/completion", {"prompt": "the a"}, num_missing=1)
        life.process.terminate()
        while "stopping: " not in life.said:
            time.sleep(0.01)
        life.process.send_signal(second)
        fault = json.loads(answer.read().split(b"\n\n")[-2].removeprefix(b"data: "))["error"]
        assert fault["code"] == 503 and fault["message"] == "the server is shutting down"
        life.check_exit(10)  # though half a request is there
