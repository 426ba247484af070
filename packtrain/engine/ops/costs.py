"""Costs of calls: work counted from shapes; ops declare it, and `planner.cost_model` multiplies it by measured rates.

The counts follow the kernels: how they split a call into tasks, and what a task repeats. Some of their constants are
repeated here, because importing them needs numba and planning does not; a test compares them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from packtrain.dtypes import Dtype, f32
from packtrain.engine.tensor import Tensor
from packtrain.kernels.runtime import multiplies

COLUMNS = 16  # of a vector: a tile has three of them, or fewer at the edge
DEPTH, BROAD = 512, 288  # steps of a sum before a tile is written, and columns packed at once
ENDS = 3  # writing a tile costs as much as this many steps of a sum
FEW_ROWS = 4  # up to this many rows use dot products
SMALL = 1 << 19  # multiply-adds below which kernels.matmul uses one thread
UNPACKING, PACKED_SMALL = 16, 1 << 21  # of kernels.packed
LEAST_COLUMNS = 256  # dequantized at a time
KEYS = 64  # of a block in attention
SLICE = 288  # columns of logits at a time in the head
# of the vocabulary: tasks of the head, by which it sums dx; rows of w in one
PARTS, LEAST_PART = 16, 64
# of the head in bf16 by AMX's tiles: most columns, chunks and rows taken at once, and steps of a tile
IN_TILES, TOGETHER, MOST_ROWS, TILE = 2048, 4, 4096, 32
WIDE = 128  # columns of an expert's task
SERIAL = 1 << 14  # below this many elements a parallel region does not pay

Rule = Callable[..., "Cost"]


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a call: amounts of work by kind, bytes of memory traffic, and its parallelism.

    work    multiply-adds of products (`multiply`) and of attention (`attend`, `attend back`);
            values packed into tiles for a product (`pack`), or dequantized for it (`unpack q4_K`, …);
            values of functions (`exp`), pairs of query and key (`score`, `score back`)
    nbytes  moved; None: what the call reads and writes
    tasks   of equal size, each for one thread
    masked  the work assumes a causal mask; with several samples in a row it is less
    by_target  the work assumes that every position has a target; those without are left out
    """

    work: Mapping[str, float] = field(default_factory=dict)
    nbytes: float | None = None
    tasks: float = math.inf
    masked: bool = False
    by_target: bool = False


def multiplied(m: int, n: int, k: float) -> float:
    """Multiply-adds of an (m, n) product over k, with padding to tiles."""
    return m * padded(n) * (k + ENDS * math.ceil(k / DEPTH))


def padded(n: int) -> int:
    return -(-n // COLUMNS) * COLUMNS


def packing(m: int, n: int, k: float) -> float:
    """Values packed for an (m, n) product over k: b once, a for each block of columns."""
    return k * (padded(n) + m * math.ceil(n / BROAD))


def product(m: int, n: int, k: int, turned: bool = False) -> Cost:
    """(m, k) @ (k, n) in f32; `turned`: the left side is transposed, as in the gradient of a weight."""
    packed = 0.0 if m <= FEW_ROWS and not turned else float(packing(m, n, k))
    work = {"multiply": multiplied(m, n, k), "pack": packed}
    return Cost(work, tasks=1 if m * n * k <= SMALL else math.inf)


def at(precision: str, cost: Cost) -> Cost:
    """The cost of products in this precision, whose multiply-adds are a kind of their own."""
    work = {**cost.work}
    work[multiplying(precision)] = work.pop("multiply")
    return replace(cost, work=work)


def multiplying(precision: str) -> str:
    """The kind of work of multiply-adds in this precision."""
    return "multiply" if precision == "f32" else f"multiply {precision}"


def product_with(m: int, w: Tensor, count: int = 1) -> Cost:
    """m rows by rows of w, of any type, in `count` products where w has leading axes."""
    n, k = w.shape[-2:]
    if w.dtype == f32:
        count = count if len(w.shape) > 2 else 1
        product_cost = product(m // max(count, 1), n, k)
        return Cost(
            {kind: count * amount for kind, amount in product_cost.work.items()},
            tasks=product_cost.tasks,
        )
    tasks = 1 if n * k * (m + UNPACKING) < PACKED_SMALL else math.inf
    work = {"multiply": multiplied(m, n, k), laying(w.dtype): float(n * k)}
    work["pack"] = float(m * k * -(-n // BROAD))
    return Cost(work, tasks=tasks)


def product_back(m: int, w: Tensor) -> Cost:
    """m rows of a gradient times a quantized w."""
    n, k = w.shape
    work = {"multiply": multiplied(m, k, n), laying(w.dtype): float(n * k)}
    work["pack"] = float(m * n * -(-k // LEAST_COLUMNS))
    return Cost(work)


def laying(dtype: Dtype) -> str:
    """The kind of work for packing a matrix of this type into tiles."""
    return "pack" if dtype == f32 else f"unpack {dtype}"


def head(
    x: Tensor, w: Tensor, dx: Tensor | None, dw: Tensor | None, chunk: int, precision: str
) -> Cost:
    """The loss of logits x @ w.T by chunks of rows, with the requested gradients."""
    (v, c), n = w.shape, x.spec.size // max(x.shape[-1], 1)
    tiled, back = in_tiles(precision, c), dx is not None or dw is not None
    chunk = rows_at_once(v, c, n, chunk, tiled)
    chunks, logits, times = -(-n // chunk), float(n * v), 1 + (tiled and back)
    layout_work, logits_nbytes = laying(w.dtype), 0.0 if tiled else 4.0 * logits
    work = {"multiply": times * multiplied(n, v, c), "exp": logits}
    work["pack"] = float(n * c * (2 if tiled else -(-v // SLICE)))
    work[layout_work] = work.get(layout_work, 0.0) + times * chunks * v * c
    nbytes = 3.0 * logits_nbytes
    if back:
        work["exp"] += logits
        nbytes += 2.0 * logits_nbytes
    if dx is not None:
        work["multiply"] += multiplied(n, c, v)
        work[layout_work] += chunks * v * c
        work["pack"] += logits * (1 if tiled else -(-c // BROAD))
    if dw is not None:
        work["multiply"] += chunks * multiplied(v, c, n / chunks)
        work["pack"] += logits if tiled else logits * -(-c // BROAD) + logits * c / SLICE
        nbytes += 8.0 * chunks * v * c
    return at(precision, Cost(work, nbytes=nbytes, tasks=parts(v), by_target=True))


def in_tiles(precision: str, columns: int) -> bool:
    """Whether the head's logits are computed twice instead of kept."""
    return precision == "bf16" and columns <= IN_TILES and multiplies("bf16x3")


def rows_at_once(v: int, c: int, n: int, chunk: int, tiled: bool) -> int:
    """Rows of a chunk, of n; in tiles more of them, but no more than the logits of the others would have room for."""
    if tiled:
        chunk = min(chunk * min(TOGETHER, 1 + v // ((parts(v) + 1) * max(c, 1))), MOST_ROWS)
    return max(min(chunk, n), 1)


def head_room(v: int, c: int, n: int, chunk: int, precision: str) -> tuple[tuple[int, ...], ...]:
    """Shapes of the workspaces of the head for n rows."""
    tiled = in_tiles(precision, c)
    rows = rows_at_once(v, c, n, chunk, tiled)
    if not tiled:
        return (rows, v), (rows, c), (parts(v), rows, c)
    padded = (-(-size // TILE) * TILE for size in (rows, c))
    return (2 * parts(v) + 1, rows), (1, *padded), (parts(v), rows, c)


def parts(v: int) -> int:
    """Parts of a vocabulary in the head's backward pass."""
    return max(min(PARTS, v // LEAST_PART), 1)


def attended(q: Tensor, k: Tensor, window: int) -> float:
    """Pairs of query and key in blocks that are not fully masked (causal mask, window), for all heads."""
    (b, t, h, d), s = q.shape, k.shape[1]
    if t != s:  # a cache: its fill is not known
        return float(b * h * t * s)
    lanes, pairs = queries(d), 0
    for first in range(0, t, lanes):
        rows = min(lanes, t - first)
        seen = first // -window * -window if window < 0 else max(first - window + 1, 0)
        start = seen // KEYS * KEYS if window else 0
        pairs += rows * (min(-(-(first + rows) // KEYS) * KEYS, t) - start)
    return float(b * h * pairs)


def queries(d: int) -> int:
    """Queries in a block, by the width of a head, see kernels.attention.queries_in_block."""
    return 64 if d <= 64 else 32 if d <= 256 else 16


def elementwise(times: float = 1.0) -> Rule:
    """Cost rule: `times` functions such as exp per element of the first input."""

    def rule(out: object, x: Tensor, *other_inputs: object, **attrs: object) -> Cost:
        tasks = 1 if x.spec.size <= SERIAL else math.inf
        return Cost({"exp": times * x.spec.size}, tasks=tasks)

    return rule


def by_expert(n: int, w: Tensor, a: int, b: int) -> Cost:
    """n rows of a values by their experts' matrices of a × b, each packed once if every expert gets rows."""
    e = min(w.shape[0], n)
    work = {"multiply": multiplied(n, b, a), laying(w.dtype): float(e * a * b)}
    return Cost(work, tasks=w.shape[0] * -(-b // WIDE))
