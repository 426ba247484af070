"""The scalar side of L-BFGS: a direction from inner products, and the search for the length of a step along it.

This module knows numbers only; the vectors stay where the weights are.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

ARMIJO, WOLFE, STRONG, NONE = "armijo", "wolfe", "strong-wolfe", "none"
CONDITIONS = (STRONG, WOLFE, ARMIJO, NONE)
MIN_CURVATURE = 1e-10  # least s.y over y.y of a pair that counts
# bounds of the next length: least distance from an end of the interval, as a part of it; most growth
NEAREST, FARTHEST_FACTOR = 0.1, 10.0


@dataclass(frozen=True, slots=True)
class LinePoint:
    """A point on the line of a search for a step: its distance (`length`), and loss and derivative (`slope`) there."""

    length: float
    loss: float
    slope: float

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.slope)


@dataclass(frozen=True, slots=True)
class LineSearch:
    """Searches for the length of a step that fulfils `condition`; the start has loss f0 and slope s0 < 0.

    armijo        f <= f0 + armijo * length * s0
    wolfe         that, and slope >= wolfe * s0
    strong-wolfe  that, and |slope| <= wolfe * |s0|
    none          nothing

    Nocedal & Wright 2006, section 3.1.
    """

    condition: str
    armijo: float = 1e-4
    wolfe: float = 0.9
    max_trials: int = 20
    min_length: float = 1e-20
    max_length: float = 1e20

    def is_too_far(self, start: LinePoint, at: LinePoint) -> bool | None:
        """Return None if point `at` is accepted; True if it is too far, beyond accepted points; False if too near."""
        if self.condition == NONE:
            return None
        if not at.is_finite or at.loss > start.loss + self.armijo * at.length * start.slope:
            return True
        if self.condition == ARMIJO:
            return None
        if at.slope < self.wolfe * start.slope:
            return False
        is_too_steep = self.condition == STRONG and at.slope > -self.wolfe * start.slope
        return True if is_too_steep else None

    def find_point(
        self, start: LinePoint, first_length: float, evaluate: Callable[[float], LinePoint]
    ) -> tuple[LinePoint, str | None]:
        """Return an accepted point, or the best point and the reason why none was accepted. `evaluate` returns the
        point at a length; the first one is `first_length`. The interval between `low` and `high_point` always holds
        accepted points: low is low enough and still falls steeply, high is too high or rises."""
        low, high_point, best, length = start, None, start, first_length
        for _ in range(self.max_trials):
            point = evaluate(length)
            too_far = self.is_too_far(start, point)
            if too_far is None:
                return point, None
            best = point if point.is_finite and point.loss < best.loss else best
            low, high_point = (low, point) if too_far else (point, high_point)
            length = next_length(low, high_point)
            is_allowed = self.min_length <= length <= self.max_length
            if not is_allowed or length in (low.length, point.length):
                return best, f"no length between {low.length:.3g} and {point.length:.3g} is left"
        tried = f"none of {self.max_trials} lengths, the last {point.length:.3g}"
        flatness = "" if self.condition == ARMIJO else " and flat enough"
        return best, f"{tried}, is low enough{flatness}"


def next_length(low_point: LinePoint, high: LinePoint | None) -> float:
    """Return the next length to try, as f32: where a cubic through both points is lowest, or farther out."""
    if high is None:
        return float(np.float32(low_point.length * FARTHEST_FACTOR if low_point.length else 1.0))
    interval, trial_length = high.length - low_point.length, math.nan
    if high.is_finite:
        mean = low_point.slope + high.slope - 3 * (high.loss - low_point.loss) / interval
        discriminant = mean * mean - low_point.slope * high.slope
        if discriminant >= 0:
            root = math.sqrt(discriminant)
            down = high.slope - low_point.slope + 2 * root
            trial_length = (
                high.length - interval * (high.slope + root - mean) / down if down else math.nan
            )
    if not math.isfinite(trial_length):
        trial_length = low_point.length + interval / 2
    min_length, max_length = low_point.length + NEAREST * interval, high.length - NEAREST * interval
    return float(np.float32(min(max(trial_length, min_length), max_length)))


def lbfgs_direction(dots: np.ndarray, newest_first: Sequence[int]) -> np.ndarray:
    """Return the coefficients (2 m + 1,) of g, s_0 …, y_0 … whose sum is -H g, by the two-loop recursion in float64.
    dots (2 m + 1, m + 1) are the products of g, s_0 …, y_0 … with g, y_0 …. Pairs of `newest_first` (indices i of s_i,
    y_i) that are not curved do not count. Chen, Wang & Zhou 2014, "Large-scale L-BFGS using MapReduce"; Nocedal &
    Wright 2006, algorithm 7.4."""
    m = dots.shape[1] - 1
    sy, yy = np.diag(dots[1 : m + 1, 1:]), np.diag(dots[m + 1 :, 1:])
    curved_pairs = [i for i in newest_first if sy[i] > MIN_CURVATURE * yy[i] > 0]
    # of g and y_0 …, which the first loop sums
    gradient_indices = np.array([0, *range(m + 1, 2 * m + 1)])
    c, alphas = np.zeros(2 * m + 1), dict[int, float]()
    c[0] = 1.0
    for i in curved_pairs:
        alphas[i] = float(dots[1 + i] @ c[gradient_indices]) / sy[i]
        c[1 + m + i] -= alphas[i]
    if curved_pairs:
        c *= sy[curved_pairs[0]] / yy[curved_pairs[0]]
    for i in reversed(curved_pairs):
        c[1 + i] += alphas[i] - float(c @ dots[:, 1 + i]) / sy[i]
    return -c
