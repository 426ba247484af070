"""What all HTML pages need that load nothing: their files, hashes and data."""

import base64
import hashlib
from importlib import resources


def asset_text(package: str, name: str) -> str:
    """Return the text of a file beside a package's modules."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def common_style() -> str:
    """Return the CSS that the pages of plans and of runs share."""
    return asset_text(__package__, "web_page.css")


def content_hash(text: str) -> str:
    """Return the hash by which a Content-Security-Policy allows a script or a style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def script_safe(text: str) -> str:
    """Escape `<`, `>` and `&` in JSON, so that the text cannot close its <script> element."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
