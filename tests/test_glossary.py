"""docs/glossary.md links each term to a module that exists, and lists only words that the package uses."""

import re
from pathlib import Path

import packtrain

PACKAGE = Path(packtrain.__file__).parent
PAGE = PACKAGE.parent / "docs/glossary.md"


def linked_terms() -> dict[str, Path]:
    """The module of each term."""
    rows = re.findall(r"^\| \[([^]]+)\]\(([^)]+)\) \|", PAGE.read_text(), re.MULTILINE)
    return {term: PAGE.parent / path for term, path in rows}


def spaced(text: str) -> str:
    """Lower case, with spaces for hyphens, underscores and the capitals inside names: `CellTable` is `cell table`."""
    return re.sub(r"[\W_]+", " ", re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", " ", text)).lower()


def test_every_term_links_to_a_module() -> None:
    assert [str(path) for path in linked_terms().values() if not path.is_file()] == []


def test_the_package_uses_every_term() -> None:
    source = " ".join(spaced(path.read_text()) for path in PACKAGE.rglob("*.py"))
    unused = [term for term in linked_terms() if f" {spaced(term)}" not in source]
    assert len(linked_terms()) > 50 and unused == []
