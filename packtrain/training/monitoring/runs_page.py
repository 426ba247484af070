"""The page of one run or of several, as HTML that loads nothing and allows only its own script and styles.

page.html has the frame, page.css the style, page.js draws. A live page asks the server that it came from for data; a
still one has the data in it."""

import json
from collections.abc import Mapping
from functools import cache, partial
from html import escape
from typing import Any

from packtrain.common.web_page import asset_text, common_style, content_hash, script_safe

_asset = partial(asset_text, __package__)


@cache
def live_page() -> tuple[str, str]:
    """Return the HTML of the live page, and its Content-Security-Policy."""
    return _fill_page("", "connect-src 'self'; frame-src 'self'")


def page_with_data(data: Mapping[str, Any]) -> str:
    """Return the HTML of a still page that shows the data of `RunsPageData.data`."""
    text, _ = _fill_page(script_safe(json.dumps(data, separators=(",", ":"), allow_nan=False)), "")
    return text


def scriptless_page(title: str, body: str, style_asset: str) -> str:
    """Return HTML without scripts in the runs page's style; `body` is HTML, `style_asset` names one more style file."""
    style = _style() + _asset(style_asset)
    policy = f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src '{content_hash(style)}'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _style() -> str:
    return common_style() + _asset("page.css")


def _fill_page(data: str, extra_policy: str) -> tuple[str, str]:
    style, script = _style(), _asset("page.js")
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src '{content_hash(style)}';"
        f" script-src '{content_hash(script)}'"
    ) + (f"; {extra_policy}" if extra_policy else "")
    text = _asset("page.html")
    replacements = {"policy": policy, "style": style, "data": data, "script": script}
    for name, replacement in replacements.items():
        text = text.replace(f"<!--{name}-->", replacement)
    return text, f"{policy}; frame-ancestors 'none'"
