"""The checks of packtrain.devtools.check as assertions, and comparisons of results.

Checks are functions of an op's name that raise AssertionError. Tests run them over the registry; planted faults show
that each can fail. See also bit_checks.
"""

from collections.abc import Iterable

import numpy as np

from packtrain.devtools.check.check_cases import (
    TOLERANCE,
    CheckResult,
    check_slopes,
    check_values,
    error_limit,
    execute,
    max_difference,
    run_graph,
    slope,
    slope_deviation,
)
from packtrain.devtools.check.op_samples import Values, random_values
from packtrain.engine import backends

__all__ = ["Values", "execute", "random_values", "run_graph", "slope"]

NO_GRADIENT = {
    "silu_back", "swiglu_back", "geglu_back", "soft_max_back", "rms_norm_back", "attention_back", "attention_back_sums",
    "cross_entropy_back",
    "opt_step_adamw", "opt_step_sgd", "clip_gate", "accumulate", "top_k", "group_rows", "weighted_rows_back",
    "opt_momentum", "opt_step_lbfgs", "lbfgs_dots", "reduce_scatter", "wait_for_sums", "all_reduce",
    "opt_moments_adamw", "opt_moments_adamw8bit", "opt_momentum8bit",
    "rounded", "matmul_rounded", "attention_cells", "rope_table", "argmax", "argsort", "count_equal", "pool_2d_back",
    "candidates", "draw", "stored_sum", "short_conv_cells", "short_conv_states", "ssm_scan_cells",
    "ssm_scan_back", "delta_rule_back", "delta_rule_cells", "tiled_back",
}  # fmt: skip


def assert_passed(check_results: Iterable[CheckResult]) -> None:
    """Raise at the first check that is beyond its tolerance, or if there is none."""
    count = 0
    for check in check_results:
        assert check.has_passed, check
        count += 1
    assert count, "nothing was checked"


def check_value(name: str) -> None:
    """cpu and numpy, through place, plan and run, give what the float64 specification gives."""
    assert_passed(check_values(name, (backends.cpu, backends.numpy)))


def check_gradient(name: str) -> None:
    """The vjp against central differences of fourth order in a random direction, in float64."""
    assert_passed(check_slopes(name))


def assert_slope(measured: float, terms: Values, label: str) -> None:
    """Raise unless the sum of all terms is the slope, relative to the terms' root of the sum of squares."""
    off = slope_deviation(measured, terms)
    allowed = TOLERANCE["finite difference"]
    assert off <= allowed, f"{label}: gradient of {', '.join(terms)} is off by {off:.3g}"


def assert_close(
    got: np.ndarray, expected: np.ndarray, label: str, tolerance: float | None = None
) -> None:
    """Raise unless got is want, to the tolerance of got's dtype; infinities and NaNs in the same places."""
    assert got.shape == expected.shape, f"{label}: shape {got.shape} instead of {expected.shape}"
    off = max_difference(got, expected)
    allowed = error_limit(got) if tolerance is None else tolerance
    assert off <= allowed, f"{label}: off by {off:.3g} of the largest value, allowed {allowed:g}"


def assert_all_close(
    got: Values, expected: Values, label: str, tolerance: float | None = None
) -> None:
    assert got.keys() == expected.keys(), f"{label}: {sorted(got)} instead of {sorted(expected)}"
    for name in expected:
        assert_close(got[name], expected[name], f"{label}: {name}", tolerance)


def assert_same_bits(got: Values, expected: Values, label: str) -> None:
    """Raise unless both hold the same names and bytes; NaNs are equal to each other."""
    assert got.keys() == expected.keys(), f"{label}: {sorted(got)} instead of {sorted(expected)}"
    for name, array in expected.items():
        equal = np.array_equal(got[name], array, equal_nan=array.dtype.kind == "f")
        if not equal:
            num_different = int((got[name] != array).sum())
            worst = float(np.abs(np.nan_to_num(got[name]) - np.nan_to_num(array)).max())
            raise AssertionError(
                f"{label}: {num_different} elements of {name} differ, by up to {worst:.3g}"
            )
