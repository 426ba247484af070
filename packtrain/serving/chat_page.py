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

INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.S)
SCRIPTS = "servers", "columns", "talks", "ask", "tokens", "turns"


def page_route() -> Route:
    """The route of the page. It asks models of any address that its user names."""
    text = page_text()
    headers = {
        "Content-Security-Policy": policy(text),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    async def page(request: Request) -> Response:
        return Response(text, media_type="text/html", headers=headers)

    return Route("/", page)


@cache
def page_text() -> str:
    """The page with its style and all of its scripts."""
    scripts = [*(f"page_{name}.js" for name in SCRIPTS), "page.js"]
    text = _asset("page.html").replace("<!--style-->", _asset("page.css"))
    return text.replace("<!--script-->", "\n".join(map(_asset, scripts)))


def _asset(name: str) -> str:
    return resources.files("packtrain.serving").joinpath(name).read_text(encoding="utf-8")


def policy(text: str) -> str:
    """What a browser may do with the page: its script and style are known by their hashes."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, content in INLINE.findall(text):
        seal = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{seal}'")
    return (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])};"
        " connect-src 'self' http: https:; img-src data:; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    )
