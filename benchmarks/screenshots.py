"""Pictures for the docs of the pages that packtrain serves and writes: python -m benchmarks.screenshots BASE

    python -m benchmarks.screenshots BASE [FLAG OF finetune …]

It tunes the base on a made-up support desk. Needs Playwright and a browser; writes into docs/images pictures of a run's
page (watch), of a comparison (compare), of a plan (plan) and of `packtrain serve` with the adapter (serve), each
light, dark and on a phone.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from benchmarks.tuning_data import Row, support
from tests.browser import RestartableServer, chromium

IMAGES = Path(__file__).parent.parent / "docs/images"
PICTURES = {
    "": ({"width": 1120, "height": 960}, "light"),
    "-dark": ({"width": 1120, "height": 960}, "dark"),
    "-phone": ({"width": 390, "height": 844}, "light"),
}
WIDE, PHONE = {"width": 1120, "height": 600}, {"width": 360, "height": 720}
SERVED_PICTURES = {"-light": (WIDE, "light"), "-dark": (WIDE, "dark"), "-phone": (PHONE, "light")}
QUESTION = "My kettle arrived broken. What should I do?"
COMMAND = [sys.executable, "-m", "packtrain"]


def pages(browser: Any, address: str, pictures: Any = PICTURES) -> dict[str, Any]:
    """The page at an address in each way, by the ends of the pictures' names."""
    opened = {}
    for name, (size, scheme) in pictures.items():
        opened[name] = browser.new_page(viewport=size, color_scheme=scheme)
        opened[name].goto(address)
    return opened


def take(opened: dict[str, Any], stem: str) -> None:
    for name, page in opened.items():
        path = IMAGES / f"{stem}{name}.png"
        page.wait_for_timeout(500)  # charts are drawn when their size is known
        page.screenshot(path=path)
        page.close()
        print(f"{path}: {path.stat().st_size:,} bytes")


def tune(browser: Any, base: str, folder: Path, extra_flags: list[str]) -> None:
    """The pictures of a run that has ended."""
    flags = ["--data", "train.jsonl", "-o", "support.gguf", "--memory", "1GiB", *extra_flags]
    command = [*COMMAND, "finetune", base, *flags, "--watch", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder) as run:
        assert run.stderr is not None
        said = next(line for line in run.stderr if "watch the run" in line)
        threading.Thread(target=run.stderr.read).start()
        opened = pages(browser, said.split()[-1])
        for page in opened.values():
            end_state = page.locator("#state").get_by_text(re.compile("finished|failed"))
            end_state.wait_for(timeout=3_600_000)
        take(opened, "watch")


def ask(page: Any) -> None:
    """Ask, and point at a token of the answer."""
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
    page.fill("#question", QUESTION)
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


def serve(browser: Any, folder: Path, base: str) -> None:
    """The pictures of the chat page, base beside tuned model."""
    flags = [
        str(folder / base),
        "--lora",
        str(folder / "support.run/adapter.gguf"),
        "--ctx",
        "2048",
    ]
    with RestartableServer(folder / "log", *flags) as served:
        opened = pages(browser, served.address, SERVED_PICTURES)
        for page in opened.values():
            ask(page)
        take(opened, "serve")


def write(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", type=Path)
    args, finetune_flags = parser.parse_known_args()  # more: flags of finetune
    rows, base = support(92), args.base.name
    with tempfile.TemporaryDirectory() as name, chromium() as browser:
        folder = Path(name)
        (folder / base).symlink_to(args.base.absolute())
        write(folder / "train.jsonl", rows[:82])
        write(folder / "test.jsonl", rows[82:])
        tune(browser, base, folder, finetune_flags)
        data = ["--data", "test.jsonl", "--pattern", r"\[LM-\d{4}\]", "-n", "48"]
        compare = [*COMMAND, "compare", base, "support.gguf", *data, "--html", "compare.html"]
        subprocess.run(compare, check=True, cwd=folder)
        take(pages(browser, (folder / "compare.html").as_uri()), "compare")
        flags = [
            "--data",
            "train.jsonl",
            "--memory",
            "1GiB",
            "--html",
            "plan.html",
            *finetune_flags,
        ]
        subprocess.run([*COMMAND, "plan", "finetune", base, *flags], check=True, cwd=folder)
        take(pages(browser, (folder / "plan.html").as_uri()), "plan")
        serve(browser, folder, base)


if __name__ == "__main__":
    main()
