"""Attention by blocks with an online softmax, and its backward from the saved log-sum-exp.

Scores are held transposed, (keys, queries): a lane is a query, so maxima and sums run down the rows, positions
and sequences compare lane by lane, and any head width is only a number of rows. Powers are of two: the
queries are packed as columns, times scale * log2(e). Blocks in which no query sees a key are skipped.
"""

import math

from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from packtrain.kernels.simd import (
    BITS,
    F32,
    I32,
    I64,
    INFINITY,
    LANES,
    MASK,
    VECTOR,
    address,
    call,
    f32x16,
    first_lanes,
    fma,
    keep_first,
    lanewise,
    largest,
    load,
    load_part,
    log,
    peek,
    poke,
    scaled,
    scratch,
    select_less,
    splat,
    spread,
    store,
    store_part,
    total,
)

KEYS = 64  # keys in a block
QUERIES = 64  # queries in a block, less where heads are wide
SCORES = KEYS * QUERIES
STATE = 2 * QUERIES
PACKED = 8192  # f32 of one packed block of queries
WIDEST = 512  # the widest head, of which 16 fill a packed block
SERIAL = 1 << 16  # products below which a parallel region costs more than it saves
FEW = 3  # queries that are not worth lanes of their own
FEW_HEADS = 16  # heads of one query at a time
FEW_SCORES = FEW_HEADS * KEYS
FEW_STATE = 2 * FEW_HEADS
LOWEST = -1e30  # the running maximum of a query that has seen no key
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
NO, SOME, ALL = 0, 1, 2  # what the queries of a block see of a block of keys

POINTER = ir.PointerType()
ZERO = ir.Constant(VECTOR, [0.0] * LANES)
HEIGHTS = (12, 4, 1)


def at(builder, base, row, stride, column):
    """The pointer to base[row * stride + column]."""
    index = builder.add(builder.mul(row, stride), column)
    return builder.gep(base, [index], source_etype=F32)


def read(builder, pointer, mask):
    if mask is None:
        return builder.load(pointer, typ=VECTOR, align=4)
    return call(builder, "llvm.masked.load.v16f32.p0", VECTOR, pointer, I32(4), mask, ZERO)


def write(builder, value, pointer, mask):
    if mask is None:
        return builder.store(value, pointer, align=4)
    name, void = "llvm.masked.store.v16f32.p0", ir.VoidType()
    return call(builder, name, void, value, pointer, I32(4), mask)


def emit_tile(builder, height, width, mask, by_column, c, ldc, a, lda, b, ldb, depth, add):
    """c (height, width * 16) = a b, + c where `add`, with the sums in registers."""
    cells = [(i, j) for i in range(height) for j in range(width)]
    spots = {(i, j): at(builder, c, I64(i), ldc, I64(j * LANES)) for i, j in cells}
    sums = {cell: cgutils.alloca_once_value(builder, ZERO) for cell in cells}
    with builder.if_then(add):
        for cell in cells:
            builder.store(read(builder, spots[cell], mask), sums[cell])
    with cgutils.for_range(builder, depth) as loop:
        k = loop.index
        rights = [read(builder, at(builder, b, k, ldb, I64(j * LANES)), mask) for j in range(width)]
        for i in range(height):
            order = (k, lda, I64(i)) if by_column else (I64(i), lda, k)
            left = builder.load(at(builder, a, *order), typ=F32, align=4)
            left = spread(builder, left, VECTOR)
            for j in range(width):
                total = builder.load(sums[i, j])
                total = call(builder, "llvm.fma.v16f32", VECTOR, left, rights[j], total)
                builder.store(total, sums[i, j])
    for cell in cells:
        write(builder, builder.load(sums[cell]), spots[cell], mask)


def emit_product(builder, by_column, m, n, depth, c, ldc, a, lda, b, ldb, add):
    """All tiles: 32 columns at a time, then 16 or what is left of them."""
    pairs = builder.and_(n, I64(-2 * LANES))
    for start, stop, width in ((I64(0), pairs, 2), (pairs, n, 1)):
        step = I64(width * LANES)
        with cgutils.for_range_slice(builder, start, stop, step, inc=True) as (j, _):
            mask = None if width == 2 else first_lanes(builder, builder.sub(n, j))
            done = I64(0)
            for height in HEIGHTS:
                rest = builder.srem(builder.sub(m, done), I64(height))
                end = builder.sub(m, rest)
                with cgutils.for_range_slice(builder, done, end, I64(height), inc=True) as (i, _):
                    corner = at(builder, c, i, ldc, j)
                    top = at(builder, a, *((I64(0), lda, i) if by_column else (i, lda, I64(0))))
                    right = at(builder, b, I64(0), ldb, j)
                    args = corner, ldc, top, lda, right, ldb, depth, add
                    emit_tile(builder, height, width, mask, by_column, *args)
                done = end


def emit_turn(builder, y, ldy, y_rows, y_columns, x, ldx, x_rows, x_columns):
    """y = x transposed: y (16, 16) of which y_rows, y_columns are written; x likewise, the rest zeros."""
    nothing = ir.Constant(MASK, [0] * LANES)

    def inside(rows, columns, i):
        lanes = first_lanes(builder, columns)
        return builder.select(builder.icmp_signed("<", I64(i), rows), lanes, nothing)

    lines = [
        read(builder, at(builder, x, I64(i), ldx, I64(0)), inside(x_rows, x_columns, i))
        for i in range(LANES)
    ]
    for step in (8, 4, 2, 1):
        first = [i + LANES - step if i & step else i for i in range(LANES)]
        second = [i + step for i in first]
        for i in (i for i in range(LANES) if not i & step):
            pair = lines[i], lines[i + step]
            for line, order in ((i, first), (i + step, second)):
                lines[line] = builder.shuffle_vector(*pair, ir.Constant(BITS, order))
    for i in range(LANES):
        write(builder, lines[i], at(builder, y, I64(i), ldy, I64(0)), inside(y_rows, y_columns, i))


def compiled(name, emit, kinds):
    """An intrinsic that calls emit(builder, *args) as one function; 'p' is an address, 'i' an int."""
    kind = {"p": POINTER, "i": I64, "b": ir.IntType(1)}

    def codegen(context, builder, sig, args):
        function = builder.module.globals.get(name)
        if function is None:
            form = ir.FunctionType(ir.VoidType(), [kind[k] for k in kinds])
            function = ir.Function(builder.module, form, name)
            function.linkage = "internal"
            function.attributes.add("noinline")
            inner = ir.IRBuilder(function.append_basic_block())
            emit(inner, *function.args)
            inner.ret_void()
        fixed = (builder.inttoptr(a, POINTER) if k == "p" else a for k, a in zip(kinds, args))
        builder.call(function, list(fixed))
        return context.get_dummy_value()

    number = {"p": types.int64, "i": types.int64, "b": types.boolean}
    return intrinsic_of(len(kinds), types.void(*[number[k] for k in kinds]), codegen)


def intrinsic_of(count, sig, codegen):
    """numba reads an intrinsic's parameters from its source, hence one lambda for each count."""
    if count == 8:
        return intrinsic(lambda typingctx, a, b, c, d, e, f, g, h: (sig, codegen))
    return intrinsic(lambda typingctx, a, b, c, d, e, f, g, h, i, j: (sig, codegen))


# (m, n, depth, c, ldc, a, lda, b, ldb, add): c (m, n) = a b [+ c]; a (m, depth) by rows, or by columns
rows_product = compiled(
    "packtrain_rows_product",
    lambda builder, *args: emit_product(builder, False, *args),
    "iiipipipib",
)
columns_product = compiled(
    "packtrain_columns_product",
    lambda builder, *args: emit_product(builder, True, *args),
    "iiipipipib",
)
turn = compiled("packtrain_turn", emit_turn, "piiipiii")


@intrinsic
def poke_int(typingctx, y, i, value):
    """Write int32 number i of the address y."""

    def codegen(context, builder, sig, args):
        y, i, value = args
        pointer = builder.gep(builder.inttoptr(y, POINTER), [i], source_etype=I32)
        builder.store(builder.trunc(value, I32), pointer)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def shown(typingctx, score, places, i, key_position, key_sequence):
    """Scores of queries i .. i + 15, -inf where a query does not see the key."""

    def codegen(context, builder, sig, args):
        score, places, i, *key = args
        base = builder.inttoptr(places, POINTER)
        found = []
        for number, value in enumerate(key):
            spot = at(builder, base, I64(number), I64(QUERIES), i)
            lanes = builder.load(spot, typ=BITS, align=4)
            value = spread(builder, builder.trunc(value, I32), BITS)
            found.append(builder.icmp_signed("==" if number else "<=", value, lanes))
        hidden = ir.Constant(VECTOR, [-INFINITY] * LANES)
        return builder.select(builder.and_(*found), score, hidden)

    kinds = (f32x16, types.int64, types.int64, types.int64, types.int64)
    return f32x16(*kinds), codegen


def emit_larger(builder, a, b):
    """One instruction on x86, unlike maximum; a NaN in b wins."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


larger = lanewise(emit_larger, 2)


@njit(f32x16(f32x16), cache=True, forceinline=True)
def power(x):
    """2**x to 1.7e-7 for x < 128, 0 below -127."""
    x = larger(-127.0, x)
    t = x + 12582912.0
    r = x - (t - 12582912.0)
    p = fma(r, 0.0013264726298940486, 0.009671513009988097)
    p = fma(p, r, 0.05550733749092541)
    p = fma(p, r, 0.24022242079184578)
    p = fma(p, r, 0.6931469775938083)
    return scaled(fma(p, r, 1.0), t)


a4, a3, a2, i2, i1 = "f4[:,:,:,::1]", "f4[:,:,::1]", "f4[:,::1]", "i4[:,::1]", "i4[::1]"
i64, i32, f32 = types.int64, types.int32, types.float32


@njit(cache=True)
def clear(x, stride, rows, width):
    for i in range(rows):
        for d in range(0, width, LANES):
            store_part(x, i * stride + d, splat(0.0), width - d)


@njit(cache=True)
def queries_in_block(width):
    """A fixed function of the head width: the packed block fits its scratch."""
    return min(QUERIES, PACKED // (-(-width // LANES) * LANES) // LANES * LANES)


@njit(cache=True)
def pack(columns, lanes, x, stride, rows, width, factor):
    """columns (width, lanes) = factor * x (rows, width) transposed, zeros in lanes behind the rows."""
    for d in range(0, width, LANES):
        for i in range(0, lanes, LANES):
            turn(
                columns + 4 * (d * lanes + i), lanes, LANES, LANES,
                x + 4 * (i * stride + d), stride, rows - i, width - d,
            )  # fmt: skip
    for i in range(0, width * lanes, LANES):
        store(columns, i, load(columns, i) * factor)


@njit(cache=True)
def place_queries(places, q_pos, q_seq, b, first, rows):
    """Positions and sequences of a block of queries to `places`; returns the least and largest of both."""
    low_pos, high_pos, low_seq, high_seq = 1 << 31, -(1 << 31), 1 << 31, -(1 << 31)
    for i in range(QUERIES):
        position, sequence = -(1 << 31), 0
        if i < rows:
            position = i64(q_pos[b, first + i]) if q_pos.size else first + i
            sequence = i64(q_seq[b, first + i]) if q_seq.size else 0
            low_pos, high_pos = min(low_pos, position), max(high_pos, position)
            low_seq, high_seq = min(low_seq, sequence), max(high_seq, sequence)
        poke_int(places, i, position)
        poke_int(places, QUERIES + i, sequence)
    return low_pos, high_pos, low_seq, high_seq


@njit(cache=True)
def sight(span, k_pos, k_seq, b, first, count):
    """What the queries with that span of positions and sequences can see of a block of keys."""
    low_pos, high_pos, low_seq, high_seq = span
    low, high, start, stop = first, first + count - 1, 0, 0
    if k_pos.size:
        low, high = 1 << 31, -(1 << 31)
        for j in range(first, first + count):
            low, high = min(low, i64(k_pos[b, j])), max(high, i64(k_pos[b, j]))
    if k_seq.size:
        start, stop = 1 << 31, -(1 << 31)
        for j in range(first, first + count):
            start, stop = min(start, i64(k_seq[b, j])), max(stop, i64(k_seq[b, j]))
    if low > high_pos or start > high_seq or stop < low_seq:
        return NO
    return ALL if high <= low_pos and start == stop == low_seq == high_seq else SOME


@njit(cache=True)
def hide(scores, lanes, places, k_pos, k_seq, b, first, count):
    """-inf in scores (count, lanes) where the query does not see the key."""
    for j in range(count):
        position = i64(k_pos[b, first + j]) if k_pos.size else first + j
        sequence = i64(k_seq[b, first + j]) if k_seq.size else 0
        for i in range(0, lanes, LANES):
            at = j * lanes + i
            store(scores, at, shown(load(scores, at), places, i, position, sequence))


@njit(cache=True)
def soften(scores, lanes, count, sums, columns, width):
    """scores (count, lanes) = 2**(scores - running maximum); sums: (maxima, sums) (2, QUERIES) follow,
    and columns (width, lanes), summed so far under the old maximum, are brought under the new one."""
    for i in range(0, lanes, LANES):
        old = load(sums, i)
        a, b, c, d = old, old, old, old
        for j in range(0, count - 3, 4):
            at = j * lanes + i
            a, b = larger(a, load(scores, at)), larger(b, load(scores, at + lanes))
            at += 2 * lanes
            c, d = larger(c, load(scores, at)), larger(d, load(scores, at + lanes))
        for j in range(count // 4 * 4, count):
            a = larger(a, load(scores, j * lanes + i))
        top = larger(larger(a, b), larger(c, d))
        fade = power(old - top)
        total = load(sums, QUERIES + i) * fade
        for j in range(count):
            e = power(load(scores, j * lanes + i) - top)
            store(scores, j * lanes + i, e)
            total = total + e
        store(sums, i, top)
        store(sums, QUERIES + i, total)
        for d in range(width):
            store(columns, d * lanes + i, load(columns, d * lanes + i) * fade)


@njit(cache=True)
def finish(y, stride, lse, rows, sums, columns, lanes, width):
    """y (rows, width) = columns transposed / sums; lse (rows,); zeros and -inf where nothing was seen."""
    for i in range(0, lanes, LANES):
        total = load(sums, QUERIES + i)
        store_part(lse, i, fma(load(sums, i), LN2, log(total)), rows - i)
        by = select_less(0.0, total, 1.0 / total, total)
        for d in range(width):
            store(columns, d * lanes + i, load(columns, d * lanes + i) * by)
        for d in range(0, width, LANES):
            turn(
                y + 4 * (i * stride + d), stride, rows - i, width - d,
                columns + 4 * (d * lanes + i), lanes, LANES, LANES,
            )  # fmt: skip


@njit(cache=True)
def attend(y, lse, q, k, v, q_pos, k_pos, q_seq, k_seq, keys, scale, b, h, first):
    """One block of queries of one head."""
    T, H, D = q.shape[1:]
    S, K = k.shape[1:3]
    rows = min(queries_in_block(D), T - first)
    lanes = -(-rows // LANES) * LANES
    columns, mixed, scores = scratch(PACKED), scratch(PACKED), scratch(SCORES)
    places, sums = scratch(STATE), scratch(STATE)
    at = ((b * T + first) * H + h) * D
    pack(columns, lanes, address(q, at), H * D, rows, D, scale * LOG2E)
    span = place_queries(places, q_pos, q_seq, b, first, rows)
    for i in range(0, lanes, LANES):
        store(sums, i, splat(LOWEST))
        store(sums, QUERIES + i, splat(0.0))
    for i in range(0, D * lanes, LANES):
        store(mixed, i, splat(0.0))
    for start in range(0, keys, KEYS):
        count = min(KEYS, keys - start)
        seen = sight(span, k_pos, k_seq, b, start, count)
        if seen == NO:
            continue
        from_key = ((b * S + start) * K + h // (H // K)) * D
        key, value = address(k, from_key), address(v, from_key)
        rows_product(count, lanes, D, scores, lanes, key, K * D, columns, lanes, False)
        if seen == SOME:
            hide(scores, lanes, places, k_pos, k_seq, b, start, count)
        soften(scores, lanes, count, sums, mixed, D)
        columns_product(D, lanes, count, mixed, lanes, value, K * D, scores, lanes, True)
    out = address(lse, (b * H + h) * T + first)
    finish(address(y, at), H * D, out, rows, sums, mixed, lanes, D)


@njit(cache=True)
def score_few(scores, heads, q, width, key, line, factor, place, k_pos, k_seq, b, first, count):
    """scores (heads, KEYS) = factor * q k for rows q (heads, width) that share a place and a kv head."""
    position, sequence = place
    for j in range(count):
        seen = (i64(k_pos[b, first + j]) if k_pos.size else first + j) <= position
        seen = seen and (k_seq.size == 0 or i64(k_seq[b, first + j]) == sequence)
        for h in range(heads):
            score = f32(-INFINITY)
            if seen:
                dot = splat(0.0)
                for d in range(0, width, LANES):
                    left = width - d
                    at_key = load_part(key, j * line + d, left)
                    dot = fma(load_part(q, h * width + d, left), at_key, dot)
                score = total(dot) * factor
            poke(scores, h * KEYS + j, score)


@njit(cache=True)
def soften_few(scores, count, sums, h, y, width):
    """soften for row h of scores (heads, KEYS), whose y (heads, width) is summed in place."""
    old = peek(sums, h)
    row, top, added = scores + 4 * KEYS * h, splat(old), splat(0.0)
    hidden = splat(-INFINITY)
    for j in range(0, count, LANES):
        top = larger(top, keep_first(load_part(row, j, count - j), count - j, hidden))
    high = largest(top)
    for j in range(0, count, LANES):
        e = power(keep_first(load_part(row, j, count - j), count - j, hidden) - high)
        store(row, j, e)
        added = added + e
    fade = power(splat(old - high))
    poke(sums, h, high)
    poke(sums, FEW_HEADS + h, total(fade * peek(sums, FEW_HEADS + h) / LANES + added))
    for d in range(0, width, LANES):
        at = h * width + d
        store_part(y, at, load_part(y, at, width - d) * fade, width - d)


@njit(cache=True)
def attend_few(y, lse, q, k, v, places_of, keys, scale, b, t, head, first, heads):
    """One query of at most FEW_HEADS heads that share kv head `head`: a lane is a part of the head."""
    q_pos, k_pos, q_seq, k_seq = places_of
    T, H, D = q.shape[1:]
    S, K = k.shape[1:3]
    scores, sums = scratch(FEW_SCORES), scratch(FEW_STATE)
    at = ((b * T + t) * H + first) * D
    q_at, y_at = address(q, at), address(y, at)
    place = i64(q_pos[b, t]) if q_pos.size else t, i64(q_seq[b, t]) if q_seq.size else 0
    clear(y_at, D, heads, D)
    for h in range(heads):
        poke(sums, h, LOWEST)
        poke(sums, FEW_HEADS + h, 0.0)
    for start in range(0, keys, KEYS):
        count = min(KEYS, keys - start)
        at = ((b * S + start) * K + head) * D
        key, value, line = address(k, at), address(v, at), K * D
        factor = f32(scale * LOG2E)
        score_few(
            scores, heads, q_at, D, key, line, factor, place, k_pos, k_seq, b, start, count
        )  # fmt: skip
        for h in range(heads):
            soften_few(scores, count, sums, h, y_at, D)
        rows_product(heads, D, count, y_at, D, scores, KEYS, value, line, True)
    for h in range(heads):
        weight = peek(sums, FEW_HEADS + h)
        lse[b, first + h, t] = peek(sums, h) * LN2 + math.log(weight) if weight > 0 else -INFINITY
        for d in range(h * D, (h + 1) * D, LANES):
            left = (h + 1) * D - d
            by = f32(1.0) / weight if weight > 0 else weight
            store_part(y_at, d, load_part(y_at, d, left) * by, left)


@njit(inline="always")
def attention_task(y, lse, q, k, v, places_of, keys, scale, task):
    """A block of queries of one head; where queries are few, all of them for a kv head."""
    q_pos, k_pos, q_seq, k_seq = places_of
    T, H, D = q.shape[1:]
    if T > FEW:
        block = queries_in_block(D)
        blocks = -(-T // block)
        b, h, first = task // blocks // H, task // blocks % H, task % blocks * block
        attend(y, lse, q, k, v, q_pos, k_pos, q_seq, k_seq, keys, scale, b, h, first)
        return
    K = k.shape[2]
    b, head, group = task // K, task % K, H // K
    for t in range(T):
        for first in range(head * group, (head + 1) * group, FEW_HEADS):
            heads = min(FEW_HEADS, (head + 1) * group - first)
            attend_few(y, lse, q, k, v, places_of, keys, scale, b, t, head, first, heads)


@njit(cache=True)
def extent(k, length, width):
    """The keys that count; heads must fit the scratch."""
    if width > WIDEST:
        raise ValueError("attention: heads are wider than 512")
    return max(min(k.shape[1], i64(length[0])), 0) if length.size else k.shape[1]


@njit(
    f"void({a4}, {a3}, {a4}, {a4}, {a4}, {i2}, {i2}, {i2}, {i2}, {i1}, f4)",
    parallel=True,
    cache=True,
)
def attention(y, lse, q, k, v, q_pos, k_pos, q_seq, k_seq, length, scale):
    """Each query mixes the values of the keys it sees.

    y_i = sum_j p_ij v_j, p_ij = exp(scale * q_i k_j - lse_i), lse_i = log(sum_j exp(scale * q_i k_j)),
    over keys j < length[0] with k_seq[j] = q_seq[i] and k_pos[j] <= q_pos[i]; query head h reads kv head
    h // (H // K). No key: y = 0, lse = -inf. Absent (size 0): sequences all equal, positions the indices
    (then T = S), length S.

        q, y (B, T, H, D), k, v (B, S, K, D), lse (B, H, T), D <= 512
        q_pos, q_seq (B, T), k_pos, k_seq (B, S), length (1,) int32
    """
    B, T, H, D = q.shape
    keys, places_of = extent(k, length, D), (q_pos, k_pos, q_seq, k_seq)
    tasks = B * k.shape[2] if T <= FEW else B * H * -(-T // queries_in_block(D))
    if B * T * H * D * keys < SERIAL:
        for task in range(tasks):
            attention_task(y, lse, q, k, v, places_of, keys, scale, task)
    else:
        for task in prange(tasks):
            attention_task(y, lse, q, k, v, places_of, keys, scale, task)


@njit(cache=True)
def prepare_back(state, dy, y, stride, lse, rows, lanes, width, scale):
    """state (2, QUERIES): lse in powers of two, where nothing was seen +inf; scale * sum(dy * y)."""
    for i in range(0, lanes, LANES):
        v = load_part(lse, i, rows - i) * LOG2E
        store(state, i, select_less(v, LOWEST, INFINITY, v))
    for i in range(lanes):
        total_of = splat(0.0)
        if i < rows:
            for d in range(0, width, LANES):
                at, left = i * stride + d, width - d
                total_of = fma(load_part(dy, at, left), load_part(y, at, left), total_of)
        poke(state, QUERIES + i, total(total_of) * scale)


@njit(cache=True)
def soften_back(scores, d_scores, lanes, count, state):
    """scores = p = 2**(scores - lse); d_scores = p * (d_scores - delta); both (count, lanes)."""
    for i in range(0, lanes, LANES):
        lse, delta = load(state, i), load(state, QUERIES + i)
        for j in range(i, count * lanes, lanes):
            p = power(load(scores, j) - lse)
            store(scores, j, p)
            store(d_scores, j, p * (load(d_scores, j) - delta))


@njit(cache=True)
def attend_back(grads, dy, y, lse, q, k, v, places_of, keys, scale, b, h, first):
    """One block of queries of one head: sets its rows of dq, adds to dk and dv."""
    dq, dk, dv = grads
    q_pos, k_pos, q_seq, k_seq = places_of
    T, H, D = q.shape[1:]
    S, K = k.shape[1:3]
    rows = min(queries_in_block(D), T - first)
    lanes = -(-rows // LANES) * LANES
    q_columns, dy_columns = scratch(PACKED), scratch(PACKED)
    p, ds, places, state = scratch(SCORES), scratch(SCORES), scratch(STATE), scratch(STATE)
    at, wide, line = ((b * T + first) * H + h) * D, H * D, K * D
    q_rows, dy_rows, dq_rows = address(q, at), address(dy, at), address(dq, at)
    pack(q_columns, lanes, q_rows, wide, rows, D, scale * LOG2E)
    pack(dy_columns, lanes, dy_rows, wide, rows, D, scale)
    from_lse = address(lse, (b * H + h) * T + first)
    prepare_back(state, dy_rows, address(y, at), wide, from_lse, rows, lanes, D, scale)
    span = place_queries(places, q_pos, q_seq, b, first, rows)
    clear(dq_rows, wide, rows, D)
    for start in range(0, keys, KEYS):
        count = min(KEYS, keys - start)
        seen = sight(span, k_pos, k_seq, b, start, count)
        if seen == NO:
            continue
        at = ((b * S + start) * K + h // (H // K)) * D
        key, value = address(k, at), address(v, at)
        rows_product(count, lanes, D, p, lanes, key, line, q_columns, lanes, False)
        rows_product(count, lanes, D, ds, lanes, value, line, dy_columns, lanes, False)
        if seen == SOME:
            hide(p, lanes, places, k_pos, k_seq, b, start, count)
        soften_back(p, ds, lanes, count, state)
        rows_product(count, D, rows, address(dv, at), line, p, lanes, dy_rows, wide, True)
        rows_product(count, D, rows, address(dk, at), line, ds, lanes, q_rows, wide, True)
        columns_product(rows, D, count, dq_rows, wide, ds, lanes, key, line, True)


@njit(inline="always")
def head_back(grads, dy, y, lse, q, k, v, places_of, keys, scale, task):
    """All of one kv head of one batch."""
    T, H, D = q.shape[1:]
    S, K = k.shape[1:3]
    b, head, group = task // K, task % K, H // K
    for x in grads[1:]:
        clear(address(x, (b * S * K + head) * D), K * D, S, D)
    for h in range(head * group, (head + 1) * group):
        for first in range(0, T, queries_in_block(D)):
            attend_back(grads, dy, y, lse, q, k, v, places_of, keys, scale, b, h, first)


@njit(
    f"void({a4}, {a4}, {a4}, {a4}, {a4}, {a3}, {a4}, {a4}, {a4}, {i2}, {i2}, {i2}, {i2}, {i1}, f4)",
    parallel=True,
    cache=True,
)
def attention_back(dq, dk, dv, dy, y, lse, q, k, v, q_pos, k_pos, q_seq, k_seq, length, scale):
    """Gradients of attention; p is recomputed by blocks from lse, a kv head of a batch is one task.

    dv_j = sum_i p_ij dy_i, ds_ij = scale * p_ij (dy_i v_j - dy_i y_i), dq_i = sum_j ds_ij k_j,
    dk_j = sum_i ds_ij q_i; all of dq, dk, dv is written.

        dq, dy, y, q (B, T, H, D), dk, dv, k, v (B, S, K, D); the rest as in attention
    """
    B, T, H, D = q.shape
    keys = extent(k, length, D)
    grads, places_of = (dq, dk, dv), (q_pos, k_pos, q_seq, k_seq)
    if B * T * H * D * keys < SERIAL:
        for task in range(B * k.shape[2]):
            head_back(grads, dy, y, lse, q, k, v, places_of, keys, scale, task)
    else:
        for task in prange(B * k.shape[2]):
            head_back(grads, dy, y, lse, q, k, v, places_of, keys, scale, task)
