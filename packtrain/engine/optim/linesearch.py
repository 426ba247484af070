"""The scalar side of L-BFGS: a direction from inner products, and the search for the length of a step along it.

It knows numbers only; the vectors stay where the weights are.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

ARMIJO, WOLFE, STRONG, NONE = "armijo", "wolfe", "strong-wolfe", "none"
CONDITIONS = (STRONG, WOLFE, ARMIJO, NONE)
CURVED = 1e-10  # least s.y over y.y of a pair that counts
# of the next trial, as parts of an interval, or as a multiple of the last
NEAREST, FARTHEST = 0.1, 10.0


@dataclass(frozen=True, slots=True)
class Point:
    """A place on the line: how far along the direction, the loss there, and its derivative along the direction."""

    length: float
    loss: float
    slope: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.slope)


@dataclass(frozen=True, slots=True)
class Search:
    """What a length must fulfil, for a start with loss f0 and slope s0 < 0. Nocedal & Wright 2006, section 3.1.

    armijo        f <= f0 + armijo * length * s0
    wolfe         that, and slope >= wolfe * s0
    strong-wolfe  that, and |slope| <= wolfe * |s0|
    none          nothing
    """

    condition: str
    armijo: float = 1e-4
    wolfe: float = 0.9
    trials: int = 20
    least: float = 1e-20
    most: float = 1e20

    def beyond(self, start: Point, at: Point) -> bool | None:
        """None if the point is accepted; else whether the accepted ones lie before it, not after it."""
        if self.condition == NONE:
            return None
        if not at.finite or at.loss > start.loss + self.armijo * at.length * start.slope:
            return True
        if self.condition == ARMIJO:
            return None
        if at.slope < self.wolfe * start.slope:
            return False
        steep = self.condition == STRONG and at.slope > -self.wolfe * start.slope
        return True if steep else None

    def along(
        self, start: Point, first: float, at: Callable[[float], Point]
    ) -> tuple[Point, str | None]:
        """An accepted point, or the best one with the reason why none was; `at` evaluates, from length `first` on.

        The interval between `low` and `high` always holds accepted points: low is low enough and still falls
        steeply, high is too high or rises.
        """
        low, high, best, length = start, None, start, first
        for _ in range(self.trials):
            point = at(length)
            too_far = self.beyond(start, point)
            if too_far is None:
                return point, None
            best = point if point.finite and point.loss < best.loss else best
            low, high = (low, point) if too_far else (point, high)
            length = following(low, high)
            if not self.least <= length <= self.most or length in (low.length, point.length):
                return best, f"no length between {low.length:.3g} and {point.length:.3g} is left"
        return best, f"none of {self.trials} lengths, the last {point.length:.3g}, is {self.wanted}"

    @property
    def wanted(self) -> str:
        return "low enough" if self.condition == ARMIJO else "low enough and flat enough"


def following(low: Point, high: Point | None) -> float:
    """The next length to try: where a cubic through both points is lowest, or farther out; as f32."""
    if high is None:
        return float(np.float32(low.length * FARTHEST if low.length else 1.0))
    width, trial_length = high.length - low.length, math.nan
    if high.finite:
        mean = low.slope + high.slope - 3 * (high.loss - low.loss) / width
        discriminant = mean * mean - low.slope * high.slope
        if discriminant >= 0:
            root = math.sqrt(discriminant)
            down = high.slope - low.slope + 2 * root
            trial_length = (
                high.length - width * (high.slope + root - mean) / down if down else math.nan
            )
    if not math.isfinite(trial_length):
        trial_length = low.length + width / 2
    min_length, max_length = low.length + NEAREST * width, high.length - NEAREST * width
    return float(np.float32(min(max(trial_length, min_length), max_length)))


def direction(dots: np.ndarray, newest_first: Sequence[int]) -> np.ndarray:
    """The coefficients (2 m + 1,) of g, s_0 …, y_0 … whose sum is -H g, by the two-loop recursion in float64.

    dots (2 m + 1, m + 1) are the products of g, s_0 …, y_0 … with g, y_0 …. Pairs that are not curved do not count.
    Chen, Wang & Zhou 2014, "Large-scale L-BFGS using MapReduce"; Nocedal & Wright 2006, algorithm 7.4.
    """
    m = dots.shape[1] - 1
    sy, yy = np.diag(dots[1 : m + 1, 1:]), np.diag(dots[m + 1 :, 1:])
    pairs = [i for i in newest_first if sy[i] > CURVED * yy[i] > 0]
    # g and y_0 …, of which the first sum is made
    by_gradients = np.array([0, *range(m + 1, 2 * m + 1)])
    c, shares = np.zeros(2 * m + 1), dict[int, float]()
    c[0] = 1.0
    for i in pairs:
        shares[i] = float(dots[1 + i] @ c[by_gradients]) / sy[i]
        c[1 + m + i] -= shares[i]
    if pairs:
        c *= sy[pairs[0]] / yy[pairs[0]]
    for i in reversed(pairs):
        c[1 + i] += shares[i] - float(c @ dots[:, 1 + i]) / sy[i]
    return -c
