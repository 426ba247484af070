"""The page of `packtrain serve`: what it may do, without a browser; how it works, in a real one."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from starlette.testclient import TestClient

from packtrain.data.conversations.record_formats import RecordReader
from packtrain.data.text.documents import SourceFile
from packtrain.models.model_file import open_model
from packtrain.serving.http_app import app, page_text, security_policy
from tests.adapters import random_adapter
from tests.architectures import random_model
from tests.browser import RestartableServer, chromium
from tests.real import BASE

HOSTILE = "<img src=x onerror=\"document.title='hit'\"><script>document.title='hit'</script>"
KEY = "secret-key"


# ---- without a browser


def test_the_page_is_public_and_says_what_it_may_do():
    answer = TestClient(app(None, [KEY])).get("/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    allowed = answer.headers["content-security-policy"]
    assert allowed == security_policy(answer.text) and "default-src 'none'" in allowed
    assert "unsafe" not in allowed and len(re.findall("'sha256-", allowed)) == 2
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_no_ui_turns_it_off():
    assert TestClient(app(None, ui=False)).get("/").status_code == 404


@pytest.mark.parametrize("ui", [True, False])
def test_a_browser_that_keeps_llama_servers_page_gets_a_worker_instead_of_it(ui):
    answer = TestClient(app(None, [KEY], ui=ui)).get("/sw.js")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith(
        "text/javascript"
    )
    assert answer.headers["cache-control"] == "no-cache"


FAKE_BROWSER = """
const handlers = {}, log = [];
const page = { url: "/", navigate: (url) => log.push("open " + url) };
const self = {
  addEventListener: (name, handler) => { handlers[name] = handler; },
  skipWaiting: () => log.push("skip"),
  registration: { unregister: async () => log.push("unregister") },
  clients: { matchAll: async (query) => (query.type === "window" ? [page] : []) },
};
const caches = { keys: async () => ["a", "b"], delete: async (key) => log.push("delete " + key) };
"""
RUN_WORKER = """
handlers.install();
handlers.activate({ waitUntil: (ending) => ending.then(() => console.log(JSON.stringify(log))) });
"""


def test_the_worker_removes_itself_and_what_it_kept_and_opens_the_page_anew():
    worker = TestClient(app(None)).get("/sw.js").text
    command = ["node", "-e", FAKE_BROWSER + worker + RUN_WORKER]
    try:
        node = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("needs node")
    assert json.loads(node.stdout) == ["skip", "unregister", "delete a", "delete b", "open /"]


def test_the_page_loads_nothing_and_writes_no_html():
    text = page_text()
    assert not re.findall(r"https?://(?!127\.0\.0\.1)", text)
    assert not re.findall(r"<script[^>]|<style[^>]|\ssrc=|@import|url\(", text)
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
    ):
        assert word not in text
    assert not re.findall(r"<[^>]*\s(?:style|on\w+)=", text), (
        "the policy forbids inline handlers and styles"
    )


# ---- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random model, and a random adapter of the run `tuned`."""
    folder = tmp_path_factory.mktemp("page")
    model, adapter = folder / "tiny.gguf", folder / "tuned.run/adapter.gguf"
    adapter.parent.mkdir()
    random_model(model, "llama")
    random_adapter(adapter, open_model(model))
    return model, adapter


def serve(folder: Path, model: Path, adapter: Path | None, *extra_flags: str) -> RestartableServer:
    """Random models never end an answer by themselves."""
    lora = ("--lora", str(adapter)) if adapter else ()
    bias_flags = [f"--logit-bias={id}-inf" for id in open_model(model).tokenizer().eog_ids]
    flags = (
        ("--chat-template", "chatml", "--ctx", "4096", *bias_flags)
        if model.name == "tiny.gguf"
        else (
            "--ctx",
            "512",
        )
    )
    return RestartableServer(folder / "log", str(model), *lora, *flags, *extra_flags)


@pytest.fixture(scope="module")
def served(files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestartableServer]:
    with serve(tmp_path_factory.mktemp("served"), *files) as served:
        yield served


@pytest.fixture
def opened(browser) -> Iterator[Any]:
    """Opens the page of a server; what the page does wrong fails the test."""
    faults, contexts = list[str](), list[Any]()

    def record_fault(message: Any) -> None:
        if "Content Security Policy" in message.text:
            faults.append(message.text)

    def open_page(address: str, **options: Any) -> Any:
        contexts.append(browser.new_context(accept_downloads=True, **options))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", record_fault)
        page.goto(address)
        page.locator(".column").first.wait_for(state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not faults


def change_settings(page: Any, **values: str) -> None:
    page.click("#adjust")
    for name, value in values.items():
        page.fill(f"#settings [name={name}]", value)
    page.click("#adjust")


def ask(page: Any, question: str, wait: bool = True) -> None:
    page.fill("#question", question)
    page.press("#question", "Enter")
    if wait:
        page.locator("#question:placeholder-shown").wait_for()
        page.locator("#stop").wait_for(state="hidden", timeout=60_000)


def choose(page: Any, name: str) -> str:
    """Choose whose answers are downloaded, by the beginning of the name; returns all of it."""
    names = page.locator("#which option").all_text_contents()
    [chosen] = [text for text in names if text.startswith(f"{name} ")]
    page.select_option("#which", label=chosen)
    return chosen


def sent_bodies(page: Any) -> list[dict[str, Any]]:
    """Bodies of the chat requests from now on."""
    bodies = list[dict[str, Any]]()

    def record_body(request: Any) -> None:
        if request.method == "POST" and request.url.endswith("/v1/chat/completions"):
            bodies.append(json.loads(request.post_data))

    page.on("request", record_body)
    return bodies


@pytest.mark.browser
@pytest.mark.parametrize("kind", ["tiny", pytest.param("real", marks=pytest.mark.real)])
def test_base_and_tuned_answer_side_by_side(kind, files, served, opened, tmp_path):
    if kind == "real":
        random_adapter(tmp_path / "tuned.gguf", open_model(BASE))
        with serve(tmp_path, BASE, tmp_path / "tuned.gguf") as real:
            compare(opened(real.address))
    else:
        compare(opened(served.address))


def compare(page: Any) -> None:
    bodies = sent_bodies(page)
    assert [page.input_value(f".column >> nth={n} >> [type=text]") for n in (0, 1)] == [
        "base",
        "tuned",
    ]
    change_settings(page, max_tokens="12", temperature="0")
    ask(page, "the a")
    assert sorted((body["lora"] for body in bodies), key=str) == [
        [{"id": 0, "scale": n}] for n in (0, 1)
    ]
    assert bodies[0]["seed"] == bodies[1]["seed"]
    texts = page.locator(".text").all_text_contents()
    assert len(texts) == 2 and texts[0] != texts[1] and all(texts)
    span = page.locator(".text span[tabindex]").nth(2)
    span.hover()
    rows = page.locator("#tip tr").all_text_contents()
    assert len(rows) in (5, 6) and sum(row.endswith("chosen") for row in rows) == 1
    assert all(re.search(r"\d+\.\d+ %", row) for row in rows)
    old_color = span.evaluate("node => getComputedStyle(node).backgroundColor")
    page.mouse.move(1, 1)
    page.check("#tint")
    new_color = span.evaluate("node => getComputedStyle(node).backgroundColor")
    assert old_color != new_color and page.locator("#tip").is_hidden()


@pytest.mark.browser
def test_several_adapters_have_columns_and_scales(files, opened, tmp_path):
    second = tmp_path / "second.gguf"
    random_adapter(second, open_model(files[0]), seed=1)
    with serve(tmp_path, *files, "--lora", str(second)) as server:
        page = opened(server.address)
        titles = page.locator(".column input[type=text]")
        assert [title.input_value() for title in titles.all()] == ["base", "tuned", "second"]
        page.get_by_label("Scale of tuned in second").press("ArrowRight")
        page.get_by_role("button", name="Remove base").click()
        titles.first.fill("mine")
        titles.first.press("Tab")
        assert page.evaluate("document.activeElement.ariaLabel") == "Remove tuned"
        bodies = sent_bodies(page)
        change_settings(page, max_tokens="5")
        ask(page, "the a")
        scales = [[adapter["scale"] for adapter in body["lora"]] for body in bodies]
        assert sorted(scales) == [[0.05, 1], [1, 0]]
        assert page.locator(".about h3").all_text_contents() == ["mine", "second"]
        page.reload()
        titles.nth(1).wait_for()
        assert [title.input_value() for title in titles.all()] == ["mine", "second"]


@pytest.mark.browser
def test_a_conversation_that_is_deleted_or_left_while_it_is_written(served, opened):
    page = opened(served.address)
    change_settings(page, max_tokens="1500")
    for button in ("#drop", "#fresh"):
        ask(page, "the a", wait=False)
        page.locator(".answer .text span").nth(3).wait_for(state="attached")
        page.click(button)
        assert page.locator(".turn").count() == 0
        page.locator("#stop").wait_for(state="hidden")
        assert page.locator("#send").is_enabled()
    page.select_option("#talk", "0")
    assert page.locator(".about", has_text="1,500 tokens").count() == 2


@pytest.mark.browser
def test_all_columns_go_on_from_a_kept_answer(served, opened):
    page = opened(served.address)
    change_settings(page, max_tokens="8", system="be brief")
    ask(page, "one")
    page.get_by_role("button", name="Keep: answer of tuned").click()
    answer_text = page.locator(".text").nth(1).text_content()
    bodies = sent_bodies(page)
    ask(page, "two")
    history = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": answer_text},
        {"role": "user", "content": "two"},
    ]
    assert [body["messages"] for body in bodies] == [history] * 2
    page.reload()
    assert page.locator(".text").nth(1).text_content() == answer_text, (
        "conversations outlive the tab"
    )


@pytest.mark.browser
def test_the_file_is_what_finetune_reads(served, opened, tmp_path):
    page = opened(served.address)
    change_settings(page, max_tokens="6", system="be")
    words = f'line\nbreak, "quotes", \u2028\u0085 and {HOSTILE} 😀'
    for question in ("why", "how"):
        ask(page, question)
        page.get_by_role("button", name="Edit: answer of tuned").last.click()
        page.locator(".text textarea").fill(words)
        page.get_by_role("button", name="Save: answer of tuned").click()
        page.get_by_role("button", name="Keep: answer of tuned").last.click()
        page.click("#fresh")
    turns = [
        [
            {"role": "system", "content": "be"},
            {"role": "user", "content": question},
            {"role": "assistant", "content": words},
        ]
        for question in ("why", "how")
    ]
    for column in ("kept answers", "tuned"):
        choose(page, column)
        with page.expect_download() as download:
            page.click("#download")
        path = tmp_path / f"{column}.jsonl"
        download.value.save_as(path)
        assert [record.messages for record in RecordReader(SourceFile(path))] == turns
    choose(page, "base")
    with page.expect_download() as download:
        page.click("#download")
    download.value.save_as(tmp_path / "base.jsonl")
    assert len(list(RecordReader(SourceFile(tmp_path / "base.jsonl")))) == 2


@pytest.mark.browser
def test_a_server_that_goes_away_and_comes_back(files, opened, tmp_path):
    server = serve(tmp_path, *files)
    with server:
        page = opened(server.address)
        change_settings(page, max_tokens="3500")
        ask(page, "the a", wait=False)
        page.locator(".answer:first-child .text span").nth(5).wait_for(state="attached")
        server.kill()
        fault = page.locator("#turns .fault").first
        fault.get_by_text(
            "The server went away while it answered; the text so far is kept."
        ).wait_for()
        assert len(page.locator(".text").first.text_content()) >= 5
        page.get_by_role("button", name="Retry").first.click()
        fault.get_by_text("cannot be reached").wait_for()
        with server:
            fault.get_by_text("It is back: try again.").wait_for()
            change_settings(page, max_tokens="5")
            page.get_by_role("button", name="Retry").first.click()
            page.get_by_text(re.compile("^5 tokens")).wait_for()
            assert fault.is_hidden()


@pytest.mark.browser
def test_by_keyboard_alone(served, opened):
    page = opened(served.address)
    page.keyboard.type("the a")
    setting_keys(page)
    page.keyboard.press("Enter")
    page.locator(".answer .text span").nth(3).wait_for(state="attached")
    page.keyboard.press("Escape")
    page.locator("#stop").wait_for(state="hidden")
    assert "stopped" in page.locator(".about").first.text_content()
    focus_by_key(page, "Shift+Tab", ".text span")
    assert page.locator("#tip").is_visible()
    first = page.evaluate("document.activeElement.textContent")
    page.keyboard.press(
        "ArrowLeft" if page.evaluate("!document.activeElement.previousSibling") else "Home"
    )
    page.keyboard.press("ArrowRight")
    stops = "document.activeElement.parentNode.querySelectorAll('[tabindex]')"  # a rest of bytes is none
    assert page.evaluate(f"document.activeElement === {stops}[1]"), first
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    focus_by_key(page, "Tab", "[data-does=keep]")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.ariaPressed") == "true"
    focus_by_key(page, "Tab", "[data-does=edit]")
    page.keyboard.press("Enter")
    page.keyboard.type("mine")
    page.keyboard.press("Control+Enter")
    assert page.evaluate("document.activeElement.dataset.does") == "edit"
    assert any("mine" in text for text in page.locator(".text").all_text_contents())


def setting_keys(page: Any) -> None:
    """Many tokens, so that there is time to stop them."""
    focus_by_key(page, "Shift+Tab", "#adjust")
    page.keyboard.press("Enter")
    focus_by_key(page, "Tab", "[name=max_tokens]")
    page.keyboard.press("Control+A")
    page.keyboard.type("3500")
    focus_by_key(page, "Tab", "#question")


def focus_by_key(page: Any, key: str, selector: str) -> None:
    for _ in range(30):
        page.keyboard.press(key)
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"{key} does not reach {selector}")


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_wider_than_the_screen(served, opened, scheme):
    options = {"has_touch": True, "color_scheme": scheme}
    page = opened(served.address, viewport={"width": 360, "height": 740}, **options)
    page.click("#tools")
    change_settings(page, max_tokens="60")
    ask(page, "a long word: " + "x" * 200)
    page.locator(".text span[tabindex]").nth(2).tap()
    page.locator("#tip").wait_for()
    page.click("#adjust")
    for width in (360, 320):
        page.set_viewport_size({"width": width, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") == width
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, re.findall(r"\d+", ground)[:3])) > 3 * 128
    assert light == (scheme == "light")


@pytest.mark.browser
def test_errors_are_said_in_words(files, opened, tmp_path):
    with serve(tmp_path, *files, "--api-key", KEY) as server:
        page = opened(server.address)
        page.locator("#access").wait_for()
        ask(page, "one")
        assert "wants an API key" in page.locator("#turns .fault").first.text_content()
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        page.locator(".column").nth(1).wait_for()
        change_settings(page, max_tokens="5")
        ask(page, "two")
        assert page.locator(".turn").nth(1).get_by_text("5 tokens").count() == 2
        change_settings(page, schema='{"type": "hiccup"}')
        ask(page, "three")
        assert "hiccup" in page.locator("#turns .fault").last.text_content()
        change_settings(page, schema="")
        ask(page, "long " * 3000)
        assert "start a new conversation" in page.locator("#turns .fault").last.text_content()
        change_settings(page, schema="{")
        page.fill("#question", "four")
        page.press("#question", "Enter")
        assert page.locator("[name=schema]").is_visible(), "the setting that is wrong is shown"
        assert page.input_value("#question") == "four" and page.locator(".turn").count() == 4


@pytest.mark.browser
def test_a_model_of_another_server_and_a_hostile_one(files, served, opened, tmp_path):
    page = opened(served.address)
    with serve(tmp_path, files[0], None, "--alias", "another") as other_server:
        page.click("#add")
        page.fill("#other [name=address]", f"{other_server.address}/v1/")
        page.press("#other [name=address]", "Enter")
        page.locator(".column").nth(2).wait_for()
        change_settings(page, max_tokens="5")
        ask(page, "the a")
        assert page.get_by_text("5 tokens").count() == 3
    chunk = {"choices": [{"delta": {"content": HOSTILE}, "finish_reason": "stop"}]}
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            content_type="text/event-stream", body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        ),
    )
    ask(page, HOSTILE)
    assert page.locator(".text").last.text_content() == HOSTILE
    assert page.locator("#turns img").count() == 0 and page.title() != "hit"
    page.click("#add")
    page.fill("#other [name=address]", other_server.address)
    page.press("#other [name=address]", "Enter")
    page.locator("#other .fault", has_text="cannot be reached").wait_for()
