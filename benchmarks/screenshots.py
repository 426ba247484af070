"""The pictures of the page of `packtrain serve` that the docs show: python -m benchmarks.screenshots MODEL ADAPTER

Needs Playwright and a browser; writes serve-light.png, serve-dark.png and serve-phone.png into docs/images.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from tests.browser import RestartableServer, chromium

IMAGES = Path(__file__).parent.parent / "docs/images"
WIDE, PHONE = {"width": 1120, "height": 600}, {"width": 360, "height": 720}
PICTURES = {"light": (WIDE, "light"), "dark": (WIDE, "dark"), "phone": (PHONE, "light")}
QUESTION = "My kettle arrived broken. What should I do?"


def picture(page: Any, address: str, question: str, path: Path) -> None:
    """Ask, point at a token, and take the picture."""
    page.goto(address)
    page.locator(".column").nth(1).wait_for(state="attached")
    folds = page.locator("#tools").is_visible()
    if folds:
        page.click("#tools")
    page.click("#adjust")
    page.fill("#settings [name=temperature]", "0")
    page.fill("#settings [name=max_tokens]", "40")
    page.click("#adjust")
    page.check("#tint")
    if folds:
        page.click("#tools")
    page.fill("#question", question)
    page.press("#question", "Enter")
    page.locator("#stop").wait_for(state="visible")
    page.locator("#stop").wait_for(state="hidden", timeout=300_000)
    page.locator("[data-does=keep]").nth(1).click()
    spans = page.locator(".answer").nth(1).locator(".text span")
    doubts = spans.evaluate_all(
        "all => all.map(one => parseInt(one.style.getPropertyValue('--doubt')))"
    )
    token_span = spans.nth(doubts.index(max(doubts[3:])))
    token_span.scroll_into_view_if_needed()
    page.wait_for_timeout(300)  # scrolling hides what is told of a token
    token_span.hover()
    page.locator("#tip").wait_for()
    page.screenshot(path=path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--question", default=QUESTION)
    args = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        log = Path(folder) / "log"
        with RestartableServer(
            log, str(args.model), "--lora", str(args.adapter), "--ctx", "2048"
        ) as served:
            for name, (size, scheme) in PICTURES.items():
                path = IMAGES / f"serve-{name}.png"
                page = browser.new_page(viewport=size, color_scheme=scheme)
                picture(page, served.address, args.question, path)
                page.close()
                print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
