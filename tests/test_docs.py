"""The pages of the docs: links and anchors lead somewhere, and the site's navigation has every page."""

import re
from pathlib import Path

import pytest
import yaml

import packtrain

ROOT = Path(__file__).parent.parent
ROOT_PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]  # fmt: skip
PAGES = [*ROOT_PAGES, *sorted((ROOT / "docs").glob("*.md"))]
SITE = ROOT / "docs/site_pages.py"
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings as GitHub makes them; a repeated heading's ends in a number."""
    names: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        count = sum(re.fullmatch(rf"{re.escape(name)}(-\d+)?", other) is not None for other in names)  # fmt: skip
        names.append(f"{name}-{count}" if count else name)
    return set(names)


def broken_links(page: Path) -> list[str]:
    broken = []
    for path, anchor in LINK.findall(prose(page)):
        target = page.parent / path if path else page
        is_page = target.suffix == ".md" and target.is_file()
        if not target.exists() or (anchor and is_page and anchor not in anchors(target)):
            broken.append(f"{path}#{anchor}" if anchor else path)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken_links(page)


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text(
        "# One & two\n```\n# Code\n```\n## One & two\n[a](#one--two) [b](#one--two-1) [c](a.md#code)\n"
        "[d](b.md) [e](https://a.b/c) ![f](a.png) [g](#three)\n"
    )
    assert broken_links(page) == ["a.md#code", "b.md", "a.png", "#three"]


def navigation(entries: list[dict[str, object]]) -> list[str]:
    """Return the pages of a navigation with sections, in order."""
    pages = []
    for entry in entries:
        for value in entry.values():
            pages += navigation(value) if isinstance(value, list) else [str(value)]
    return pages


def test_the_navigation_has_every_page_once() -> None:
    pages = navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert len(pages) == len(set(pages))
    added_names = re.findall(r'"([a-z]+\.md)"', SITE.read_text())  # pages that the site writes
    assert {"index.md", "changelog.md", "contributing.md", "api.md"} == set(added_names)
    assert {*pages} == {*added_names, *(page.name for page in (ROOT / "docs").glob("*.md"))}


def test_the_library_reference_has_every_module_of_public_names() -> None:
    titles = re.search(r"SECTION_TITLES = \{(.*?)\n\}", SITE.read_text(), re.DOTALL)
    assert titles
    modules = set(re.findall(r'^    "([\w.]+)":', titles[1], re.MULTILINE))
    without_section = packtrain._LAZY_EXPORTS.keys() - modules
    assert without_section == {"dtypes"} and modules <= packtrain._LAZY_EXPORTS.keys()
