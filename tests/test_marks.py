"""The list of slow tests names tests that are there."""

from pathlib import Path

import pytest

from tests.conftest import SLOW

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("begin", SLOW)
def test_slow_tests_are_there(begin: str) -> None:
    file, _, name = begin.partition("::")
    assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text()


def test_slow_tests_are_sorted_and_listed_once() -> None:
    assert [*SLOW] == sorted({*SLOW})
