"""Pictures for the docs of the pages of a run, a comparison and a plan: python -m benchmarks.run_screenshots BASE

It tunes the base on a made-up support desk. Needs Playwright and a browser; writes watch.png, watch-dark.png,
watch-phone.png, and the same of compare and plan, into docs/images.
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

from benchmarks.screenshots import IMAGES
from benchmarks.tuning_data import Row, support
from tests.browser import chromium

PICTURES = {
    "": ({"width": 1120, "height": 960}, "light"),
    "-dark": ({"width": 1120, "height": 960}, "dark"),
    "-phone": ({"width": 390, "height": 844}, "light"),
}
COMMAND = [sys.executable, "-m", "packtrain"]


def pages(browser: Any, address: str) -> dict[str, Any]:
    """The page at an address in each way, by the ends of the pictures' names."""
    opened = {}
    for name, (size, scheme) in PICTURES.items():
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


if __name__ == "__main__":
    main()
