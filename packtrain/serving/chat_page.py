"""The page at /: HTML that loads nothing, and may run its own script and use its own style only.

page.html has the frame, page.css the style; the scripts follow each other in one element, page.js as the last.
"""

import base64
import hashlib
import re
from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

INLINE_ELEMENT = re.compile(r"<(script|style)>(.*?)</\1>", re.S)
SCRIPT_NAMES = "servers", "columns", "talks", "ask", "tokens", "turns"


def page_route() -> Route:
    """Create the route of the chat page, which may ask models at any address that its user names."""
    page_html = page_text()
    headers = {
        "Content-Security-Policy": security_policy(page_html), "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache",
    }  # fmt: skip

    async def serve_page(request: Request) -> Response:
        return Response(page_html, media_type="text/html", headers=headers)

    return Route("/", serve_page)


@cache
def page_text() -> str:
    """Return the page's HTML with its style and all of its scripts."""
    scripts = [*(f"page_{name}.js" for name in SCRIPT_NAMES), "page.js"]
    page_html = _read_asset("page.html").replace("<!--style-->", _read_asset("page.css"))
    return page_html.replace("<!--script-->", "\n".join(map(_read_asset, scripts)))


def _read_asset(name: str) -> str:
    return resources.files("packtrain.serving").joinpath(name).read_text(encoding="utf-8")


def security_policy(page_html: str) -> str:
    """Return the page's Content-Security-Policy, which knows its script and style by their hashes."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for element_name, element_text in INLINE_ELEMENT.findall(page_html):
        digest = base64.b64encode(hashlib.sha256(element_text.encode()).digest()).decode()
        hashes[element_name].append(f"'sha256-{digest}'")
    return (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])};"
        " connect-src 'self' http: https:; img-src data:; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    )
