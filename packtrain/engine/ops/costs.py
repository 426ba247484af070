"""Costs of calls: ops count work from shapes, and `planner.cost_model` multiplies it by measured rates.

The counts follow the kernels: how they split a call into tasks, and what a task repeats. Some of their constants are
repeated here, because importing them needs numba and planning does not; a test compares them.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from packtrain.dtypes import Dtype, f32
from packtrain.engine.tensor import Tensor, spec_nbytes
from packtrain.kernels.runtime.environment import supports_precision

VECTOR_COLUMNS = 16  # of a vector: a tile has three of them, or fewer at the edge
TILE_DEPTH, BROAD = 512, 288  # steps of a sum before a tile is written, and columns packed at once
TILE_WRITE_STEPS = 3  # writing a tile costs as much as this many steps of a sum
MAX_DOT_ROWS = 4  # up to this many rows use dot products
MIN_PARALLEL_WORK = 1 << 19  # multiply-adds below which kernels.matmul_f32 uses one thread
UNPACK_ROWS, MIN_PARALLEL_UNPACK_WORK = 16, 1 << 21  # of kernels.packed
UNPACKED_COLUMNS = 256  # dequantized at a time
KEYS = 64  # of a block in attention
LOGIT_COLUMNS = 288  # columns of logits at a time in the head
# of the vocabulary: tasks of the head, by which it sums dx; rows of w in one
MAX_VOCAB_PARTS, MIN_VOCAB_PART_ROWS = 16, 64
# of the head in bf16 by AMX's tiles: most columns, chunks and rows taken at once, and steps of a tile
MAX_TILED_COLUMNS, MAX_TILED_CHUNKS, MOST_ROWS, TILE_STEPS = 2048, 4, 4096, 32
EXPERT_TASK_COLUMNS = 128  # columns of an expert's task
MIN_PARALLEL_NBYTES = 1 << 17  # bytes from which a parallel region pays
MIN_PARALLEL_VALUES = 1 << 14  # below this many elements a parallel region does not pay

CostRule = Callable[..., "Cost"]


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a call: amounts of work by kind, bytes of memory traffic, and its parallelism.

    work          multiply-adds of products (`multiply`) and of attention (`attend`, `attend back`);
                  values packed into tiles for a product (`pack`), or dequantized for it (`unpack q4_K`, …);
                  values of functions (`exp`), pairs of query and key (`score`, `score back`)
    nbytes        bytes of memory traffic; None: all that the call reads and writes
    num_tasks     tasks of equal size, each for one thread
    is_causal     the work assumes a causal mask; with several samples in a row it is less
    only_targets  the work assumes that every position has a target; positions without one are left out
    """

    work: Mapping[str, float] = field(default_factory=dict)
    nbytes: float | None = None
    num_tasks: float = math.inf
    is_causal: bool = False
    only_targets: bool = False


def call_cost(call: Any, read: Collection[Tensor] = ()) -> Cost:
    """Return the cost that the op of a Call or KernelStep declares; by default only its memory traffic.

    read  tensors that some step reads: optional results are only computed if they are among them
    """
    op = call.op
    if op.cost_rule is None:
        return Cost(num_tasks=math.inf if traffic_nbytes(call, Cost()) > MIN_PARALLEL_NBYTES else 1)
    outputs = call.results
    if op.optional:
        outputs = [t if i not in op.optional or t in read else None for i, t in enumerate(outputs)]
    is_multiple = len(outputs) > 1 or op.writes
    cost: Cost = op.cost_rule(outputs if is_multiple else outputs[0], *call.inputs, **call.attrs)
    return cost


def traffic_nbytes(call: Any, cost: Cost) -> float:
    """Return the bytes that a Call or KernelStep moves: those of its cost, else those that it reads and writes."""
    if cost.nbytes is not None:
        return cost.nbytes
    tensors = (*call.results, *call.reads)
    return float(sum([spec_nbytes(t.spec.shape, t.spec.dtype) for t in tensors]))


def multiplied(m: int, n: int, k: float) -> float:
    """Return the multiply-adds of an (m, k) @ (k, n) product with padding to tiles, writing the tiles included."""
    num_columns = -(-n // VECTOR_COLUMNS) * VECTOR_COLUMNS
    return m * num_columns * (k + TILE_WRITE_STEPS * math.ceil(k / TILE_DEPTH))


def f32_product_cost(m: int, n: int, k: int, transposed: bool = False) -> Cost:
    """Return the cost of (m, k) @ (k, n) in f32; `transposed`: the left side is, as in the gradient of a weight."""
    # b is packed once, a for each block of columns
    num_columns = -(-n // VECTOR_COLUMNS) * VECTOR_COLUMNS
    num_packed = float(k * (num_columns + m * math.ceil(n / BROAD)))
    num_packed = 0.0 if m <= MAX_DOT_ROWS and not transposed else num_packed
    work = {"multiply": multiplied(m, n, k), "pack": num_packed}
    return Cost(work, num_tasks=1 if m * n * k <= MIN_PARALLEL_WORK else math.inf)


def at(precision: str, cost: Cost) -> Cost:
    """Return the cost of products in this precision, whose multiply-adds have a measured rate of their own."""
    work = {**cost.work}
    work[multiply_kind(precision)] = work.pop("multiply")
    return replace(cost, work=work)


def multiply_kind(precision: str) -> str:
    """Return the kind of work, which has its own rate, of multiply-adds in this precision."""
    return "multiply" if precision == "f32" else f"multiply {precision}"


def weight_product_cost(m: int, w: Tensor, num_products: int = 1) -> Cost:
    """Return the cost of multiplying m rows by w, of any type, in `num_products` products where w has leading axes."""
    shape, dtype = w.spec.shape, w.spec.dtype
    n, k = shape[-2:]
    if dtype == f32 and len(shape) == 2:
        return f32_product_cost(m, n, k)
    if dtype == f32:
        product_cost = f32_product_cost(m // max(num_products, 1), n, k)
        work = {kind: num_products * amount for kind, amount in product_cost.work.items()}
        return replace(product_cost, work=work)
    num_tasks = 1 if n * k * (m + UNPACK_ROWS) < MIN_PARALLEL_UNPACK_WORK else math.inf
    work = {"multiply": multiplied(m, n, k), pack_kind(w.dtype): float(n * k)}
    work["pack"] = float(m * k * -(-n // BROAD))
    return Cost(work, num_tasks=num_tasks)


def weight_product_back_cost(m: int, w: Tensor) -> Cost:
    """Return the cost of multiplying m rows of a gradient by a quantized w."""
    n, k = w.shape
    work = {"multiply": multiplied(m, k, n), pack_kind(w.dtype): float(n * k)}
    work["pack"] = float(m * n * -(-k // UNPACKED_COLUMNS))
    return Cost(work)


def pack_kind(dtype: Dtype) -> str:
    """Return the kind of work, which has its own rate, of unpacking or packing a matrix of this type into tiles."""
    return "pack" if dtype == f32 else f"unpack {dtype}"


def head_cost(
    x: Tensor, w: Tensor, dx: Tensor | None, dw: Tensor | None, chunk: int, precision: str
) -> Cost:
    """Return the cost of the loss of logits x @ w.T, `chunk` rows at a time, with gradients dx and dw unless None."""
    (v, c), n = w.shape, x.spec.size // max(x.shape[-1], 1)
    is_tiled, has_gradients = in_tiles(precision, c), dx is not None or dw is not None
    chunk = head_chunk_rows(v, c, n, chunk, is_tiled)
    num_chunks, logits, num_passes = -(-n // chunk), float(n * v), 1 + (is_tiled and has_gradients)
    layout_kind, logits_nbytes = pack_kind(w.dtype), 0.0 if is_tiled else 4.0 * logits
    work = {"multiply": num_passes * multiplied(n, v, c), "exp": logits}
    work["pack"] = float(n * c * (2 if is_tiled else -(-v // LOGIT_COLUMNS)))
    work[layout_kind] = work.get(layout_kind, 0.0) + num_passes * num_chunks * v * c
    nbytes = 3.0 * logits_nbytes
    if has_gradients:
        work["exp"] += logits
        nbytes += 2.0 * logits_nbytes
    if dx is not None:
        work["multiply"] += multiplied(n, c, v)
        work[layout_kind] += num_chunks * v * c
        work["pack"] += logits * (1 if is_tiled else -(-c // BROAD))
    if dw is not None:
        work["multiply"] += num_chunks * multiplied(v, c, n / num_chunks)
        work["pack"] += logits if is_tiled else logits * -(-c // BROAD) + logits * c / LOGIT_COLUMNS
        nbytes += 8.0 * num_chunks * v * c
    return at(precision, Cost(work, nbytes=nbytes, num_tasks=parts(v), only_targets=True))


def in_tiles(precision: str, num_columns: int) -> bool:
    """Whether the loss head, for x of `num_columns`, runs on AMX tiles: logits are then computed twice, not saved."""
    return precision == "bf16" and num_columns <= MAX_TILED_COLUMNS and supports_precision("bf16x3")


def head_chunk_rows(v: int, c: int, n: int, chunk: int, is_tiled: bool) -> int:
    """Return the rows of a chunk: `chunk`, but at most n; with tiles more, as far as the room that saved logits would
    take allows. v: vocabulary, c: columns of x."""
    if is_tiled:
        chunk = min(chunk * min(MAX_TILED_CHUNKS, 1 + v // ((parts(v) + 1) * max(c, 1))), MOST_ROWS)
    return max(min(chunk, n), 1)


def head_room(v: int, c: int, n: int, chunk: int, precision: str) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the loss head's workspaces for n rows, `chunk` at a time, vocabulary v and width c."""
    is_tiled = in_tiles(precision, c)
    chunk_rows = head_chunk_rows(v, c, n, chunk, is_tiled)
    if not is_tiled:
        return (chunk_rows, v), (chunk_rows, c), (parts(v), chunk_rows, c)
    padded_sizes = (-(-size // TILE_STEPS) * TILE_STEPS for size in (chunk_rows, c))
    return (2 * parts(v) + 1, chunk_rows), (1, *padded_sizes), (parts(v), chunk_rows, c)


def parts(v: int) -> int:
    """Return into how many parts the head's backward pass divides a vocabulary of v tokens; each part is a task."""
    return max(min(MAX_VOCAB_PARTS, v // MIN_VOCAB_PART_ROWS), 1)


def num_attended_pairs(q: Tensor, k: Tensor, window: int) -> float:
    """Count pairs of query and key in blocks that are not fully masked (causal mask, window), for all heads."""
    (b, t, h, d), s = q.shape, k.shape[1]
    if t != s:  # a cache: its fill is not known
        return float(b * h * t * s)
    block_queries, num_pairs = queries_per_block(d), 0
    for query_start in range(0, t, block_queries):
        rows = min(block_queries, t - query_start)
        seen = query_start // -window * -window if window < 0 else max(query_start - window + 1, 0)
        key_start = seen // KEYS * KEYS if window else 0
        num_pairs += rows * (min(-(-(query_start + rows) // KEYS) * KEYS, t) - key_start)
    return float(b * h * num_pairs)


def queries_per_block(d: int) -> int:
    """Return the queries of a block for heads of width d, see kernels.flash_attention.queries_in_block."""
    return 64 if d <= 64 else 32 if d <= 256 else 16


def elementwise_cost(calls_per_value: float = 1.0) -> CostRule:
    """Return a cost rule for `Op.cost`: `calls_per_value` functions such as exp for each element of the first input."""

    def cost_rule(out: object, x: Tensor, *other_inputs: object, **attrs: object) -> Cost:
        size = math.prod(x.spec.shape)
        num_tasks = 1 if size <= MIN_PARALLEL_VALUES else math.inf
        return Cost({"exp": calls_per_value * size}, num_tasks=num_tasks)

    return cost_rule


def by_expert(n: int, w: Tensor, a: int, b: int) -> Cost:
    """Return the cost of n rows of `a` values times their expert's (a, b) matrix of w, if rows reach all experts."""
    num_experts = min(w.shape[0], n)
    work = {"multiply": multiplied(n, b, a), pack_kind(w.dtype): float(num_experts * a * b)}
    return Cost(work, num_tasks=w.shape[0] * -(-b // EXPERT_TASK_COLUMNS))
