"""The lists of slow tests and of those with exhaustive cases name tests that are there."""

from pathlib import Path

import pytest

from tests.conftest import EXHAUSTIVE, SLOW

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("begin", [*SLOW, *(name for name, _ in EXHAUSTIVE)])
def test_listed_tests_are_there(begin: str) -> None:
    file, _, name = begin.partition("::")
    assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text()


def test_listed_tests_are_sorted_and_listed_once() -> None:
    for names in ([*SLOW], [name for name, _ in EXHAUSTIVE]):
        assert names == sorted({*names})
