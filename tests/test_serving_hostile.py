"""The server as a process, under requests, connections and files that no one would wish for."""

import http.client
import json
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("starlette")

from benchmarks.watched import private_nbytes_of
from packtrain.common.errors import InputError
from packtrain.common.events import Events
from packtrain.models.model_file import open_model
from packtrain.serving import http_listener
from packtrain.serving.http_app import app
from packtrain.serving.response_shapes import ERROR_TYPES
from packtrain.serving.server_state import RequestLimits
from packtrain.workflows.model_server import ServeSettings, load_server
from tests import hostile_requests
from tests.adapters import random_adapter
from tests.architectures import random_model
from tests.hostile_requests import BODY, Ask, routes
from tests.servers import ServerProcess, serve_process

MEMORY = 209 << 20  # hardly more than the least with which it starts
SECRETS = b"Traceback", b'File "', b"site-packages", str(Path(__file__).parent.parent).encode()
NUM_UNREAD_ANSWERS = 60  # answers that nobody takes
BODIES_PER_ROUTE = 8  # wrong bodies for each route
PLAIN_TEXT_STATUSES = {400, 503}  # where the server below the application says so in plain text
TYPES = {*ERROR_TYPES.values(), "server_error", "exceed_context_size_error"}


class Hostile(ServerProcess):
    """A server with what it answered to a good request, and the most memory it ever had."""

    def __init__(self, served: ServerProcess, folder: Path) -> None:
        super().__init__(served.process, served.port, served.log)
        self.folder, self.peak, self.done = folder, 0, threading.Event()
        self.before = self.good_answer()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self.done.wait(0.02):
            self.peak = max(self.peak, private_nbytes_of(self.process.pid))

    def good_answer(self) -> str:
        request = BODY | {"max_tokens": 12, "n_predict": 12, "lora": [{"id": 0, "scale": 1}]}
        status, _, body = self.ask(
            Ask("POST", "/v1/chat/completions", json.dumps(request).encode())
        )
        assert status == 200, body
        text: str = json.loads(body)["choices"][0]["message"]["content"]
        return text

    def check(self) -> None:
        """Raise AssertionError unless all is as it was: slots, answers, memory, and nothing that was a fault."""
        end = time.monotonic() + 30
        while any(slot["is_processing"] for slot in json.loads(self.ask(Ask("GET", "/slots"))[2])):
            assert time.monotonic() < end, "a slot stays busy"
            time.sleep(0.05)
        assert self.good_answer() == self.before
        assert self.process.poll() is None
        assert "Traceback" not in self.log.read_text(errors="replace")
        assert self.peak <= MEMORY, f"{self.peak >> 20} MiB"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hostile]:
    folder = tmp_path_factory.mktemp("hostile")
    random_model(folder / "m.gguf", "llama")
    random_adapter(folder / "a.gguf", open_model(folder / "m.gguf"))
    (folder / "slots").mkdir()
    flags = ["--ctx", "512", "--memory", f"{MEMORY >> 20}MiB", "--metrics", "--embeddings", "--chat-template",
    "chatml"]  # fmt: skip
    flags += ["--slot-save-path", str(folder / "slots"), "--lora", str(folder / "a.gguf")]
    with serve_process(folder / "m.gguf", *flags) as served:
        hostile_server = Hostile(served, folder)
        yield hostile_server
        hostile_server.done.set()


@pytest.fixture
def server(started: Hostile) -> Iterator[Hostile]:
    yield started
    started.check()


def check_answer(server: Hostile, ask: Ask, status: int, kind: str, body: bytes) -> None:
    """Raise AssertionError unless an answer has the right shape, and tells nothing of the inside."""
    assert 200 <= status < 600 and status != 500, (ask, status, body[:300])
    if ask.path.split("?")[0] != "/":
        assert not any(word in body for word in (*SECRETS, str(server.folder).encode())), (ask, body[:500])  # fmt: skip
    if ask.method == "HEAD" or not body:
        return
    if status >= 400:
        if status in PLAIN_TEXT_STATUSES and kind.startswith("text/plain"):
            return
        fault = json.loads(body)["error"]
        assert fault["code"] == status and fault["type"] in TYPES, (ask, body[:300])
        assert isinstance(fault["message"], str) and fault["message"], (ask, body[:300])
    elif kind.startswith("application/json"):
        json.loads(body.decode(), parse_constant=refused)
    elif kind.startswith("text/event-stream"):
        for event in body.decode().split("\n\n"):
            if event.startswith("data: {"):
                json.loads(event.removeprefix("data: "), parse_constant=refused)


def refused(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


def ask_all(server: Hostile, asks: list[Ask], clients: int = 4) -> None:
    """Ask all, several at once. Raises AssertionError with all that was wrong."""
    wrong = list[str]()

    def ask_share(number: int) -> None:
        with server.connection() as connection:
            for ask in asks[number::clients]:
                try:
                    check_answer(server, ask, *server.ask(ask, connection))
                except (OSError, http.client.HTTPException, AssertionError, ValueError) as error:
                    connection.close()
                    wrong.append(f"{ask}: {error!r}")

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(ask_share, range(clients)))
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:40])


def test_every_route_refuses_what_is_wrong(server: Hostile) -> None:
    asks = hostile_requests.requests(1, BODIES_PER_ROUTE)
    assert {path.split("{")[0] for path, _ in routes()} >= {"/completion", "/slots/", "/health"}
    ask_all(server, asks)


def test_what_takes_long_or_much_is_refused_or_bounded(server: Hostile) -> None:
    """Each is answered in half a minute, while others are."""
    ask_all(server, hostile_requests.bombs(), clients=12)


# ---- bytes that are no proper request


def send_bytes(server: ServerProcess, *pieces: bytes, pause: float = 0.0) -> bytes:
    """What the server answers to these bytes, until it closes the connection or says nothing for a while."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        received = b""
        try:
            for piece in pieces:
                sock.sendall(piece)
                time.sleep(pause)
            sock.settimeout(0.5)
            while piece := sock.recv(1 << 16):
                received += piece
        except (ConnectionError, TimeoutError):
            pass
        return received


def head(
    length: int | str, *headers: str, path: str = "/completion", version: str = "1.1"
) -> bytes:
    lines = f"POST {path} HTTP/{version}", "Host: a", f"Content-Length: {length}", *headers, "", ""
    return "\r\n".join(lines).encode("latin-1")


GOOD = json.dumps(BODY).encode()
CHUNKED = b"POST /completion HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
LARGE = 3 << 20
RAW: tuple[tuple[bytes, ...], ...] = (
    (b"",), (b"\r\n" * 1000,), (b"\0" * 1000,), (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",), (b"GET\r\n\r\n",),
    (b"GET / HTTP/9.9\r\n\r\n",), (b"GET /health HTTP/1.1\r\n\r\n",), (b"GET /health\r\n",), (b"A" * 200_000,),
    (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",), (b"GET /%zz%\xff HTTP/1.1\r\nHost: a\r\n\r\n",),
    (b"GET http://[::bad/x HTTP/1.1\r\nHost: a\r\n\r\n",), (b"GET /../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n",),
    (b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n",),
    (b"GET /health HTTP/1.1\r\nHost: a\r\nBad Header\r\n\r\n",),
    (b"GET /health HTTP/1.1\r\nHost: \x00\r\n\r\n",), (b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",), (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",),
    (b"GET /health HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",),
    (head(len(GOOD), *(f"X-{n}: {'y' * 100}" for n in range(2000))), GOOD), (head(len(GOOD),
    "X: " + "y" * 100_000), GOOD),
    (head(len(GOOD), *("A: b" for _ in range(5000))), GOOD), (head(len(GOOD), "Authorization: Bearer \xff"), GOOD),
    (head(-1), GOOD), (head("x"), GOOD), (head("9" * 40), GOOD), (head("9" * 15), GOOD), (head(999), GOOD),
    (head(5), GOOD),
    (head(len(GOOD), "Content-Length: 3"), GOOD), (head(len(GOOD), "Transfer-Encoding: chunked"), GOOD),
    (head(LARGE), b" " * LARGE), (head(LARGE, "Expect: 100-continue"), b" " * LARGE), (head(LARGE), b" " * 100),
    (CHUNKED, *(b"10000\r\n" + b" " * 65536 + b"\r\n" for _ in range(40)), b"0\r\n\r\n"), (CHUNKED,
    b"FFFFFFFFFFFFFFFF\r\n"),
    (CHUNKED, b"-1\r\n"), (CHUNKED, b"zz\r\n"), (CHUNKED, b"5;" + b"x" * 100_000 + b"\r\nabcde\r\n0\r\n\r\n"),
    (CHUNKED, f"{len(GOOD):x}\r\n".encode() + GOOD + b"\r\n0\r\n", b"X: y\r\n" * 30_000), (head(len(GOOD),
    "Content-Encoding: gzip"), GOOD),
)  # fmt: skip


def test_bytes_that_are_no_proper_request(server: Hostile) -> None:
    """A refusal, or nothing; and headers cut anywhere, with a byte changed, or no sense at all do no harm either."""
    rng, full_request = random.Random(2), head(len(GOOD)) + GOOD
    asks = list[tuple[bytes, ...]](RAW)
    for _ in range(30):
        at = rng.randrange(len(full_request))
        changed = full_request[:at] + rng.randbytes(1) + full_request[at + 1 :]
        asks += [(rng.randbytes(rng.randrange(1, 3000)),), (full_request[:at],), (changed,)]
    with ThreadPoolExecutor(16) as pool:
        answers = [*pool.map(lambda pieces: send_bytes(server, *pieces), asks)]
    statuses = Counter(answer[9:12].decode() for answer in answers)
    assert statuses.keys() <= {"", "100", "200", "400", "401", "404", "405", "413", "431", "501"}
    assert statuses["400"] > 40 and statuses["413"] >= 3 and statuses["200"] >= 3
    assert not any(word in answer for word in SECRETS for answer in answers)


def test_old_and_pipelined_requests(server: Hostile) -> None:
    full_request = head(len(GOOD)) + GOOD
    old_reply = send_bytes(server, head(len(GOOD), version="1.0"), GOOD)
    assert old_reply.startswith(b"HTTP/1.1 200") and b'"content"' in old_reply
    pipelined = send_bytes(
        server, full_request + full_request + b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
    )
    assert pipelined.count(b"HTTP/1.1 200") == 3 and pipelined.endswith(b'{"status":"ok"}')


# ---- connections


def streaming(server: ServerProcess, count: int = 400) -> socket.socket:
    """A connection on which a long answer comes."""
    body = BODY | {"stream": True, "n_predict": count, "max_tokens": count, "ignore_eos": True}
    text = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    sock.sendall(head(len(text)) + text)
    return sock


def test_who_goes_away_or_reads_slowly_holds_no_slot(server: Hostile) -> None:
    rng = random.Random(3)
    for number in range(24):
        with streaming(server) as sock:
            if number % 3:
                sock.recv(rng.randrange(1, 4000))
            if number % 4 == 0:  # closed with a reset
                linger_option = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_option)
    slow = [streaming(server, 200) for _ in range(8)]
    for _ in range(5):
        for sock in slow:
            assert sock.recv(1)
    server.check()
    for sock in slow:
        sock.close()


def test_idle_connections_keep_nobody_out(server: Hostile) -> None:
    sockets = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(200)]
    for sock in sockets[:100]:
        sock.sendall(head(999)[:60])
    assert server.good_answer() == server.before
    for sock in sockets:
        sock.close()


def test_slots_are_files_of_the_folder_only(server: Hostile) -> None:
    """No link out of it, no folder, no pipe, no damaged file; and what it says has no path."""
    slots, outside = server.folder / "slots", server.folder / "outside"
    outside.write_text("secret")
    (slots / "link").symlink_to(outside)
    (slots / "dangling").symlink_to(server.folder / "new")
    (slots / "folder").mkdir()
    (slots / "empty").touch()
    os.mkfifo(slots / "pipe")
    asks = [Ask("POST", "/slots/0?action=save", b'{"filename": "good"}')]
    ask_all(server, asks)
    content = (slots / "good").read_bytes()
    rng = random.Random(4)
    for number in range(12):
        at = rng.randrange(len(content))
        changed = (
            content[:at]
            if number % 2
            else content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        )
        (slots / f"damaged{number}").write_bytes(changed)
    names = (
        "../outside",
        str(outside),
        "a\0b",
        "..",
        ".",
        "",
        "a/b",
        "a\\b",
        "a" * 129,
        "\u202e",
        "~root",
        "$HOME",
    )
    links = "link", "dangling", "folder", "pipe"
    damaged = [path.name for path in slots.iterdir() if path.name.startswith(("damaged", "empty"))]
    pairs = [(action, name) for action in ("save", "restore") for name in (*names, *links)]
    for action, name in [*pairs, *(("restore", name) for name in (*damaged, "none"))]:
        ask = Ask("POST", f"/slots/0?action={action}", json.dumps({"filename": name}).encode())
        status, kind, body = server.ask(ask)
        assert status == 400, (ask, status, body)
        check_answer(server, ask, status, kind, body)
    assert outside.read_text() == "secret" and not (server.folder / "new").exists()


@pytest.fixture
def impatient(
    started: Hostile, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[int]:
    """The port of a server that waits for clients not as long, and keeps not as much for them."""
    server = load_server(
        ServeSettings(started.folder / "m.gguf", ctx=256, chat_template="chatml"), Events()
    )
    server.limits = RequestLimits(patience=0.5)
    for name, value in request.param.items():
        monkeypatch.setattr(http_listener, name, value)
    sock = http_listener.bind_sockets(["127.0.0.1"], 0)[0]
    running = http_listener.make_listener(app(server), server.engine, print)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [sock]})
    port: int = sock.getsockname()[1]
    thread.start()
    yield port
    running.should_exit = True
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("impatient", [{"IDLE_SECONDS": 0.5}], indirect=True)
def test_who_sends_too_slowly_is_cut(impatient: int) -> None:
    def connected() -> socket.socket:
        return socket.create_connection(("127.0.0.1", impatient), timeout=20)

    with connected() as silent, connected() as half, connected() as slow:
        half.sendall(head(999) + b"{")
        with pytest.raises(ConnectionError):
            for byte in head(len(GOOD)) * 100:
                slow.sendall(bytes([byte]))
                time.sleep(0.05)
        assert half.recv(1 << 16).startswith(b"HTTP/1.1 408")
        with suppress(ConnectionError):
            assert silent.recv(1) == b""


@pytest.mark.parametrize(
    "impatient", [{"IDLE_SECONDS": 0.5}, {"MAX_UNSENT_NBYTES": 1 << 16}], indirect=True
)
def test_who_takes_no_answers_is_cut(impatient: int) -> None:
    body = json.dumps({"content": "a " * 100_000}).encode()
    received = b""
    with socket.create_connection(("127.0.0.1", impatient), timeout=20) as client:
        asking = threading.Thread(
            target=flood, args=(client, head(len(body), path="/tokenize") + body)
        )
        asking.start()
        asking.join(20)  # it ends when the connection does
        assert not asking.is_alive()
        with suppress(ConnectionError):
            while piece := client.recv(1 << 20):
                received += piece
    assert 0 < received.count(b"HTTP/1.1 200") < NUM_UNREAD_ANSWERS


def flood(sock: socket.socket, text: bytes) -> None:
    """Ask again and again, and take no answer."""
    with suppress(OSError):
        for _ in range(NUM_UNREAD_ANSWERS):
            sock.sendall(text)


def test_several_addresses_share_a_port() -> None:
    probe = socket.socket(socket.AF_INET6) if socket.has_ipv6 else None
    try:
        if probe is None:
            raise OSError("no IPv6")
        probe.bind(("::1", 0))
        probe.close()
    except OSError:
        pytest.skip("this machine has no ::1")
    sockets = http_listener.bind_sockets(["127.0.0.1", "::1"], 0)
    with sockets[0], sockets[1]:
        ports = {sock.getsockname()[1] for sock in sockets}
        assert len(ports) == 1 and 0 not in ports
        with pytest.raises(InputError, match=r"--host ::1 .*cannot listen there"):
            http_listener.bind_sockets(["::1"], *ports)
