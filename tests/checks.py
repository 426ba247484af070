"""The checks of packtrain.devtools.check as assertions, and comparisons of results.

Checks are functions of an op's name that raise AssertionError. Tests run them over the registry; planted faults show
that each can fail. See also bit_checks.
"""

from collections.abc import Iterable

import numpy as np

from packtrain.devtools.check.check_cases import Found, checked_slopes, checked_values
from packtrain.devtools.check.gradients import off_slope, slope
from packtrain.devtools.check.op_samples import Values, values
from packtrain.devtools.check.running import TOLERANCE, apart, execute, limit, run
from packtrain.engine import backends

__all__ = ["Values", "execute", "run", "slope", "values"]

NO_GRADIENT = {
    "silu_back", "swiglu_back", "geglu_back", "soft_max_back", "rms_norm_back", "attention_back", "cross_entropy_back",
    "opt_step_adamw", "opt_step_sgd", "clip_gate", "accumulate", "top_k", "group_rows", "weighted_rows_back",
    "opt_momentum", "opt_step_lbfgs", "lbfgs_dots", "reduce_scatter", "arrive", "all_reduce",
    "opt_moments_adamw",
    "rounded", "matmul_rounded", "attention_cells", "rope_table", "argmax", "argsort", "count_equal", "pool_2d_back",
    "candidates", "draw", "stored_sum", "short_conv_cells", "short_conv_states", "ssm_scan_cells",
    "ssm_scan_back", "delta_rule_back", "delta_rule_cells",
}  # fmt: skip


def passed(found: Iterable[Found]) -> None:
    """Raise at the first check that is beyond its tolerance, or if there is none."""
    count = 0
    for check in found:
        assert check.passed, check
        count += 1
    assert count, "nothing was checked"


def check_value(name: str) -> None:
    """cpu and numpy, through place, plan and run, give what the float64 specification gives."""
    passed(checked_values(name, (backends.cpu, backends.numpy)))


def check_gradient(name: str) -> None:
    """The vjp against central differences of fourth order in a random direction, in float64."""
    passed(checked_slopes(name))


def is_slope(measured: float, terms: Values, what: str) -> None:
    """Raise unless the sum of all terms is the slope, relative to the terms' root of the sum of squares."""
    off = off_slope(measured, terms)
    allowed = TOLERANCE["finite difference"]
    assert off <= allowed, f"{what}: gradient of {', '.join(terms)} is off by {off:.3g}"


def close(got: np.ndarray, want: np.ndarray, what: str, tolerance: float | None = None) -> None:
    """Raise unless got is want, to the tolerance of got's dtype; infinities and NaNs in the same places."""
    assert got.shape == want.shape, f"{what}: shape {got.shape} instead of {want.shape}"
    off = apart(got, want)
    allowed = limit(got) if tolerance is None else tolerance
    assert off <= allowed, f"{what}: off by {off:.3g} of the largest value, allowed {allowed:g}"


def all_close(got: Values, want: Values, what: str, tolerance: float | None = None) -> None:
    assert got.keys() == want.keys(), f"{what}: {sorted(got)} instead of {sorted(want)}"
    for name in want:
        close(got[name], want[name], f"{what}: {name}", tolerance)


def same_bits(got: Values, want: Values, what: str) -> None:
    """Raise unless both hold the same names and bytes; NaNs are equal to each other."""
    assert got.keys() == want.keys(), f"{what}: {sorted(got)} instead of {sorted(want)}"
    for name, array in want.items():
        equal = np.array_equal(got[name], array, equal_nan=array.dtype.kind == "f")
        if not equal:
            num_different = int((got[name] != array).sum())
            worst = float(np.abs(np.nan_to_num(got[name]) - np.nan_to_num(array)).max())
            raise AssertionError(
                f"{what}: {num_different} elements of {name} differ, by up to {worst:.3g}"
            )
