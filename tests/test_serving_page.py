"""The page of `packtrain serve`: what it may do, without a browser; how it works, in a real one."""

import re
from importlib import resources

import pytest

pytest.importorskip("starlette")

from starlette.testclient import TestClient

from packtrain.serving.app import app
from packtrain.serving.page import policy

TEXT = resources.files("packtrain.serving").joinpath("page.html").read_text(encoding="utf-8")
HOSTILE = "<img src=x onerror=\"document.title='hit'\"><script>document.title='hit'</script>"
KEY = "secret-key"


# ---- without a browser


def test_the_page_is_public_and_says_what_it_may_do():
    answer = TestClient(app(None, [KEY])).get("/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    allowed = answer.headers["content-security-policy"]
    assert allowed == policy(answer.text) and "default-src 'none'" in allowed
    assert "unsafe" not in allowed and len(re.findall("'sha256-", allowed)) == 2
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_no_ui_turns_it_off():
    assert TestClient(app(None, ui=False)).get("/").status_code == 404


def test_the_page_loads_nothing_and_writes_no_html():
    assert not re.findall(r"https?://(?!127\.0\.0\.1)", TEXT)
    assert not re.findall(r"<script[^>]|<style[^>]|\ssrc=|@import|url\(", TEXT)
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
    ):
        assert word not in TEXT
    assert not re.findall(r"<[^>]*\s(?:style|on\w+)=", TEXT), (
        "the policy forbids inline handlers and styles"
    )
