"""Every planted fault is caught by every check that is named with it; they pass without the fault."""

from collections import Counter

import pytest

from tests import faults_experts, faults_gradients, faults_kernels, faults_plans
from tests.faults import FAULTS, Check, Fault

# they filled FAULTS when they were imported
LISTS = (faults_experts, faults_kernels, faults_gradients, faults_plans)
passed_checks: set[Check] = set()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    for check in fault.caught_by:
        if check not in passed_checks:
            check()
            passed_checks.add(check)
    fault.plant(monkeypatch)
    for check in fault.caught_by:
        with pytest.raises(fault.raised):
            check()


def test_there_are_faults_of_every_kind() -> None:
    areas = Counter(fault.area for fault in FAULTS)
    assert len(FAULTS) >= 40
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert set(areas) == {
        "kernel", "vjp", "gradient", "recomputation", "view", "place", "in place", "update", "planner", "run",
        "search", "verifier", "tiles",
    }  # fmt: skip
