"""The page of `packtrain serve` over time: models that change, reloads, undo, phones, a server that goes and comes.

Answers are written by the test where only the page matters, so that they are as long as a case needs.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from packtrain.data.conversations.record_formats import RecordReader
from packtrain.data.text.documents import SourceFile
from packtrain.models.model_file import open_model
from tests.adapters import random_adapter
from tests.browser import RestartableServer
from tests.test_serving_page import (  # noqa: F401
    ask,
    browser,
    change_settings,
    choose,
    files,
    opened,
    sent_bodies,
    serve,
    served,
)

pytestmark = pytest.mark.browser
PHONE = {"width": 360, "height": 740}


def stream(text: str, has_logprobs: bool = True) -> str:
    """A streamed answer, a token for each word with its probability and one other."""
    lines = list[dict[str, Any]]()
    for n, token in enumerate(re.findall(r"\s*\S+", text)):
        alternative = {"token": "other", "logprob": math.log(0.25)}
        logprob = {
            "token": token,
            "logprob": math.log(0.5 if n % 2 else 0.9),
            "top_logprobs": [alternative],
        }
        shown_logprob = logprob if has_logprobs else {"token": token, "logprob": None}
        lines.append(
            {"choices": [{"delta": {"content": token}, "logprobs": {"content": [shown_logprob]}}]}
        )
    lines.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    return "".join(f"data: {json.dumps(line)}\n\n" for line in lines) + "data: [DONE]\n\n"


def answer_requests(page: Any, answer: Callable[[dict[str, Any], bool], str | None]) -> None:
    """Answer chat requests by a function of their body and of whether the adapter is on; None: none comes."""

    def respond(route: Any) -> None:
        body = json.loads(route.request.post_data)
        text = answer(body, any(adapter["scale"] for adapter in body.get("lora", [])))
        if text is None:
            route.abort()
        else:
            route.fulfill(content_type="text/event-stream", body=text)

    page.route("**/v1/chat/completions", respond)


def answer_with(page: Any, base: str, tuned: str) -> None:
    answer_requests(page, lambda body, is_tuned: stream(tuned if is_tuned else base))


def button(page: Any, name: str) -> Any:
    return page.get_by_role("button", name=name, exact=True)


def downloaded(page: Any, path: Path) -> list[dict[str, Any]]:
    with page.expect_download() as download:
        page.click("#download")
    download.value.save_as(path)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---- what is downloaded


def test_kept_answers_count_wherever_they_stand(served, opened, tmp_path):  # noqa: F811
    page = opened(served.address)
    answer_requests(
        page, lambda body, on: stream(f"{'tuned' if on else 'base'} {len(body['messages'])}")
    )
    ask(page, "one")
    ask(page, "two")
    ask(page, "three")
    assert choose(page, "kept answers") == "kept answers (0)"
    page.click("#download")
    assert "No answer is kept yet" in page.locator("#said").text_content()
    button(page, "Keep: answer of tuned").nth(1).click()
    assert choose(page, "kept answers") == "kept answers (1)"
    [line] = downloaded(page, tmp_path / "kept.jsonl")
    assert line["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "tuned 1", "weight": 0},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "tuned 3"},
    ]
    said = page.locator("#said").text_content()
    assert "1 answer written, in 1 conversation; 1 other answer as context" in said
    assert len(list(RecordReader(SourceFile(tmp_path / "kept.jsonl")))) == 1


def test_a_column_learns_from_no_answer_of_another(served, opened, tmp_path):  # noqa: F811
    page = opened(served.address)
    answer_requests(
        page, lambda body, on: stream(f"{'tuned' if on else 'base'} {len(body['messages'])}")
    )
    ask(page, "one")
    button(page, "Keep: answer of base").click()
    ask(page, "two")
    assert choose(page, "tuned").endswith("(2)")
    lines = downloaded(page, tmp_path / "tuned.jsonl")
    trained_answers = [
        [m["content"] for m in line["messages"] if m["role"] == "assistant" and "weight" not in m]
        for line in lines
    ]
    assert trained_answers == [["tuned 1"], ["tuned 3"]]
    assert lines[1]["messages"][1] == {"role": "assistant", "content": "base 1", "weight": 0}
    assert [line["models"][-1].split()[0] for line in lines] == ["tuned", "tuned"]


def test_answers_stay_with_the_adapter_that_wrote_them(files, opened, tmp_path):  # noqa: F811
    model, adapter = files
    other_adapter = tmp_path / "other.run/adapter.gguf"
    other_adapter.parent.mkdir()
    random_adapter(other_adapter, open_model(model), seed=1)
    server = serve(tmp_path, model, adapter)
    with server:
        page = opened(server.address)
        change_settings(page, max_tokens="6")
        ask(page, "the a")
        names = page.locator(".answer .model").all_text_contents()
        hashes = page.evaluate("[servers.get(OWN).hash, servers.get(OWN).adapters[0].sha256]")
        assert names == [f"tiny {hashes[0][:8]}", hashes[1][:8]]
        first_answer = page.locator(".text").nth(1).text_content()
        button(page, "Keep: answer of tuned").click()
        page.evaluate("knock = async () => {}")  # the server is away for less than a look at it
    new_server = serve(tmp_path, model, other_adapter)
    new_server._port, new_server.address = server._port, server.address
    with new_server:
        button(page, "Regenerate: answer of base").click()
        titles = page.locator(".column [type=text]")
        button(page, "Remove other").wait_for()
        assert [title.input_value() for title in titles.all()] == ["base", "other"]
        page.locator("#stop").wait_for(state="hidden")
        page.reload()
        page.locator(".column").nth(1).wait_for()
        assert page.locator(".row > .answer").nth(1).get_by_text("not asked").is_visible()
        other_answers = page.locator(".others")
        assert f"tuned {hashes[1][:8]}" in other_answers.locator("summary").text_content()
        assert other_answers.locator(".text").text_content() == first_answer
        assert (
            other_answers.locator(".kept").count() == 1
            and button(page, "Keep: answer of tuned").count() == 0
        )
        assert choose(page, "other").endswith("(0)")
        assert choose(page, "tuned") == f"tuned {hashes[1][:8]} (1)"
        [line] = downloaded(page, tmp_path / "tuned.jsonl")
        assert line["models"] == [f"tuned {hashes[1][:8]}"]


def test_answers_stored_without_a_model_are_named_so(served, opened):  # noqa: F811
    page = opened(served.address)
    stored_answer = {
        "text": "hello",
        "by": "tuned",
        "state": "done",
        "tokens": 1,
        "likely": 0,
        "scales": [1],
    }
    talk = {
        "system": "",
        "turns": [{"question": "hi", "answers": {"adapter0": stored_answer}, "kept": None}],
    }
    page.evaluate("talks => localStorage.setItem('packtrain.talks', JSON.stringify(talks))", [talk])
    page.reload()
    page.locator(".column").nth(1).wait_for()
    page.locator("summary").click()
    assert page.locator(".others .model").text_content() == "model not recorded"
    assert choose(page, "tuned model") == "tuned model not recorded (1)"


# ---- probabilities


def test_probabilities_outlive_a_reload(served, opened):  # noqa: F811
    page = opened(served.address)
    change_settings(page, max_tokens="12", temperature="0")
    ask(page, "the a")
    span = page.locator(".text span[tabindex]").nth(2)
    span.hover()
    rows = page.locator("#tip tr").all_text_contents()
    page.check("#tint")
    tint = "node => getComputedStyle(node).backgroundColor"
    colour, text = span.evaluate(tint), page.locator(".text").first.text_content()
    page.reload()
    page.locator(".column").nth(1).wait_for()
    assert page.is_checked("#tint") and page.locator(".text").first.text_content() == text
    assert span.evaluate(tint) == colour != "rgba(0, 0, 0, 0)"
    span.hover()
    assert page.locator("#tip tr").all_text_contents() == rows and len(rows) > 4


def test_tint_is_off_where_no_answer_has_probabilities(served, opened):  # noqa: F811
    page = opened(served.address)
    answer_requests(page, lambda body, is_tuned: stream("one two three", has_logprobs=False))
    page.check("#tint")
    ask(page, "one")
    assert page.is_disabled("#tint") and not page.is_checked("#tint")
    assert page.locator("label", has_text="No probabilities to tint").count() == 1
    assert page.get_by_text("no probabilities: the server sent none").count() == 2
    answer_with(page, "four", "five six")
    ask(page, "two")
    assert page.is_checked("#tint") and page.is_enabled("#tint")
    reasons = page.locator(".lacks").all_text_contents()
    assert reasons == [*2 * ["no probabilities: the server sent none"], "", ""]


def test_a_full_store_loses_probabilities_and_says_so(served, opened):  # noqa: F811
    page = opened(served.address)
    answer_with(page, "a short one", "word " * 1500)
    ask(page, "one")
    page.click("#fresh")
    page.evaluate(
        """() => {
          for (let size = 1 << 22; size > 1 << 13; size >>= 1)
            try { for (let n = 0; n < 9; n++) localStorage.setItem(`filler${size}-${n}`, "x".repeat(size)); } catch {}
        }"""
    )
    ask(page, "two")
    page.select_option("#talk", "0")
    assert page.get_by_text("no probabilities: this browser's store is full").count() == 2
    assert page.is_disabled("#tint")
    page.reload()
    page.locator(".column").nth(1).wait_for()
    assert page.locator(".text").nth(1).text_content() == ("word " * 1500).strip()


# ---- layout


def test_answers_are_as_high_as_they_are(served, opened):  # noqa: F811
    page = opened(served.address)
    answer_with(page, "yes", "word " * 900)
    ask(page, "one")
    heights = page.locator(".answer").evaluate_all("all => all.map(one => one.clientHeight)")
    assert 2 * heights[0] < heights[1]
    button(page, "Edit: answer of tuned").click()
    page.locator(".text textarea").press("End")
    overflow_script = """all => all.filter(one => one.scrollHeight > one.clientHeight + 3
      && ["auto", "scroll"].includes(getComputedStyle(one).overflowY)).length"""
    drawn = "node => new Promise(done => requestAnimationFrame(() => done(node.clientHeight)))"
    assert page.locator(".text textarea").evaluate(drawn) > 300
    assert page.locator("main *").evaluate_all(overflow_script) == 0


def test_a_phone_folds_controls_and_long_answers(served, opened):  # noqa: F811
    page = opened(served.address, viewport=PHONE, has_touch=True)
    answer_with(page, "yes", "word " * 900)
    ask(page, "one")
    height = "node => node.getBoundingClientRect().height"
    controls = sum(
        page.locator(selector).evaluate(height)
        for selector in ("header", ".tools >> nth=0", "#ask")
    )
    assert controls < 0.33 * PHONE["height"] and page.locator("#columns").is_hidden()
    text = page.locator(".text").nth(1)
    assert text.evaluate(height) < 300 < text.evaluate("node => node.scrollHeight")
    more_button = page.locator(".more:visible")
    assert more_button.all_text_contents() == ["Show all"], "a short answer does not fold"
    more_button.click()
    assert text.evaluate(height) > 1000 and more_button.get_attribute("aria-expanded") == "true"
    more_button.click()
    assert text.evaluate(height) < 300
    page.locator("#tools").click()
    assert page.locator("#columns").is_visible() and page.locator("#download").is_visible()
    page.locator("#adjust").click()
    page.locator("#tools").click()
    assert page.locator("#columns").is_hidden() and page.locator("#settings").is_hidden()
    page.evaluate("$('settings').elements.temperature.value = '-1'")
    page.fill("#question", "two")
    page.press("#question", "Enter")
    assert page.locator("[name=temperature]").is_visible(), "the setting that is wrong is shown"


@pytest.mark.parametrize("size", [PHONE, {"width": 1120, "height": 600}])
def test_hints_do_not_move_the_page(size, served, opened):  # noqa: F811
    page = opened(served.address, viewport=size)
    answer_with(page, "yes", "no")
    place = """() => ["#question", ".buttons", ".examples, .turn"].map(name => {
      const { left, top, width, height } = document.querySelector(name).getBoundingClientRect();
      return [left, top, width, name === "#question" ? height : 0];
    }).flat()"""
    place_before = page.evaluate(place)
    ask(page, "one")
    place_during = page.evaluate(place)
    assert place_during[:8] == place_before[:8]
    button(page, "Keep: answer of tuned").click()
    assert page.evaluate(place) == place_during
    button(page, "Kept: answer of tuned").click()
    page.evaluate("say('A sentence that is too long for one line of a phone. '.repeat(2))")
    assert page.evaluate(place) == place_during
    button(page, "Regenerate: answer of base").click()
    button(page, "Undo regenerate").wait_for()
    assert page.evaluate(place) == place_during


# ---- what can be taken back, and tried again


def test_deleting_can_be_undone(served, opened):  # noqa: F811
    page = opened(served.address)
    answer_with(page, "first", "second")
    ask(page, "one")
    button(page, "Keep: answer of tuned").click()
    page.click("#drop")
    assert page.locator(".turn").count() == 0
    assert page.evaluate("document.activeElement.id") == "undo", (
        "the keyboard is where it is needed"
    )
    page.keyboard.press("Enter")
    assert page.locator(".text").all_text_contents() == ["first", "second"]
    assert page.locator(".answer.kept").count() == 1 and page.locator("#talk option").count() == 1
    button(page, "Edit question").click()
    button(page, "Undo edit").click()
    assert page.locator(".text").all_text_contents() == ["first", "second"]
    button(page, "Remove base").click()
    button(page, "Undo remove").click()
    assert page.locator(".column").count() == 2 and page.locator(".others").count() == 0
    answer_with(page, "third", "fourth")
    button(page, "Regenerate: answer of tuned").click()
    page.locator(".text", has_text="fourth").wait_for()
    button(page, "Undo regenerate").click()
    page.reload()
    page.locator(".column").nth(1).wait_for()
    assert page.locator(".text").all_text_contents() == ["first", "second"]
    assert page.locator(".answer.kept").count() == 1


def test_all_failed_answers_are_tried_again_at_once(served, opened):  # noqa: F811
    page = opened(served.address)
    answer_requests(page, lambda body, is_tuned: None)
    ask(page, "one")
    ask(page, "two")
    assert page.locator(".fault:visible").count() == 4
    bodies = sent_bodies(page)
    answer_with(page, "yes", "no")
    button(page, "Retry all").click()
    page.locator(".text", has_text="no").nth(1).wait_for()
    page.locator("#stop").wait_for(state="hidden")
    assert page.locator(".fault:visible").count() == 0 and page.locator("#retry").is_hidden()
    assert [len(body["messages"]) for body in bodies] == [1, 1, 3, 3], (
        "later turns see earlier ones"
    )


def test_an_empty_page_has_questions_to_begin_with(served, opened):  # noqa: F811
    page = opened(served.address)
    answer_with(page, "yes", "no")
    example = page.locator(".examples button").first
    question = example.text_content()
    example.focus()
    page.keyboard.press("Enter")
    page.locator(".text", has_text="no").wait_for()
    assert page.locator(".question p").text_content() == question
    assert page.locator(".examples").count() == 0
    ask(page, "a question of mine")
    page.click("#fresh")
    assert page.locator(".examples button").count() == 4
    ask(page, "a question of mine")
    page.click("#fresh")
    assert page.locator(".examples button").last.text_content() == "a question of mine"


# ---- the connection


def test_the_page_says_whether_the_server_is_there(files, opened, tmp_path):  # noqa: F811
    server: RestartableServer = serve(tmp_path, *files)
    with server:
        page = opened(server.address)
        link = page.locator("header .link")
        link.get_by_text("connected").wait_for()
        server.kill()
        link.get_by_text(re.compile(r"server gone since \d\d:\d\d:\d\d")).wait_for()
        assert "gone" in link.get_attribute("class")
        with server:
            link.get_by_text("connected").wait_for()


# ---- two tabs


def another_tab(page: Any) -> Any:
    new_page = page.context.new_page()
    new_page.set_default_timeout(20_000)
    new_page.goto(page.url)
    new_page.locator(".column").nth(1).wait_for()
    return new_page


def conversation_titles(page: Any) -> list[str]:
    return [text.partition(": ")[2] for text in page.locator("#talk option").all_text_contents()]


def test_conversations_of_two_tabs_are_all_kept(served, opened):  # noqa: F811
    page = opened(served.address)
    second_tab = another_tab(page)
    for tab, question in ((page, "one"), (second_tab, "two")):
        answer_with(tab, "yes", "no")
        ask(tab, question)
    button(page, "Keep: answer of tuned").click()
    for tab, question in ((page, "one"), (second_tab, "two")):
        assert sorted(conversation_titles(tab)) == ["one", "two"]
        assert tab.locator(".question p").text_content() == question
        tab.reload()
        tab.locator(".column").nth(1).wait_for()
        assert sorted(conversation_titles(tab)) == ["one", "two"]
        assert choose(tab, "kept answers") == "kept answers (1)"
        assert tab.locator(".question p").text_content() == question


def test_a_conversation_in_two_tabs_goes_on_in_both(served, opened):  # noqa: F811
    page = opened(served.address)
    answer_with(page, "yes", "no")
    ask(page, "one")
    second_tab = another_tab(page)
    answer_with(second_tab, "yes", "no")
    button(page, "Keep: answer of tuned").click()
    second_tab.locator(".answer.kept").wait_for()
    ask(second_tab, "two")
    page.locator(".turn").nth(1).wait_for()
    assert conversation_titles(page) == conversation_titles(second_tab) == ["one"]
    button(second_tab, "Edit: answer of base").first.click()
    ask(page, "three")
    second_tab.locator(".text textarea").fill("my own")
    button(second_tab, "Save: answer of base").click()
    assert "both are in the list" in second_tab.locator("#said").text_content()
    page.locator("#talk option").nth(1).wait_for(state="attached")
    page.reload()
    page.locator(".column").nth(1).wait_for()
    turns = []
    for at in range(2):
        page.select_option("#talk", str(at))
        turns.append(page.locator(".question p").all_text_contents())
    assert sorted(turns) == [["one", "two"], ["one", "two", "three"]]


def test_what_one_tab_deletes_the_other_does_not_bring_back(served, opened):  # noqa: F811
    page = opened(served.address)
    answer_with(page, "yes", "no")
    ask(page, "one")
    second_tab = another_tab(page)
    answer_with(second_tab, "yes", "no")
    second_tab.click("#fresh")
    page.click("#drop")
    ask(second_tab, "two")
    assert conversation_titles(second_tab) == ["two"]
    page.click("#undo")
    second_tab.locator("#talk option").nth(1).wait_for(state="attached")
    assert sorted(conversation_titles(second_tab)) == ["one", "two"]
