"""Random graphs by seed.

They mix views, several results, writes to leaves, gradients, recomputation and updates: what the planner has to get
right at once. Values stay of order one, so that f32 can be compared with float64.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

import packtrain as pt
from packtrain.engine import ops
from packtrain.engine.optim.adamw import opt_step_adamw
from packtrain.engine.optim.sgd import opt_step_sgd
from packtrain.engine.tensor import Tensor

ADAMW = np.array([1e-2, 0.9, 0.95, 1e-8, 0.1, 0.19, 0.0975], np.float32)


@dataclass
class Case:
    """A graph with values for its leaves; `keep` is what its backward pass was allowed to read."""

    graph: pt.Graph
    values: dict[str, np.ndarray]
    keep: list[Tensor] | None


@dataclass
class Writer:
    """A graph being written: `pool` are values to go on from, `before` what leaves held before a write, to be kept."""

    rng: np.random.Generator
    prefix: str
    values: dict[str, np.ndarray] = field(default_factory=dict)
    weights: list[Tensor] = field(default_factory=list)
    handles: list[Tensor] = field(default_factory=list)
    pool: list[Tensor] = field(default_factory=list)
    before: list[Tensor] = field(default_factory=list)

    def number(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high))

    def choice(self, of: list) -> object:  # type: ignore[type-arg]
        return of[self.number(0, len(of))]

    def leaf(
        self, make: Callable[..., Tensor], shape: tuple[int, ...], scale: float = 1.0
    ) -> Tensor:
        t = make(f"{self.prefix}{make.__name__}{len(self.values)}", shape)
        self.values[t.label] = (scale * self.rng.standard_normal(shape)).astype(np.float32)
        if make is pt.weight:
            self.weights.append(t)
        return t

    def weight(self, *shape: int) -> Tensor:
        """A new weight, or one that was used before."""
        reusable = [w for w in self.weights if w.shape == shape]
        if reusable and self.rng.random() < 0.5:
            return self.choice(reusable)  # type: ignore[return-value]
        return self.leaf(pt.weight, shape, shape[-1] ** -0.5 if len(shape) > 1 else 1.0)

    def ids(self, count: int, below: int, *, distinct: bool = False) -> Tensor:
        chosen = (
            self.rng.permutation(below)[:count] if distinct else self.rng.integers(-1, below, count)
        )
        return pt.constant("ids", chosen, pt.i32)

    def matrix(self) -> Tensor:
        """A value from the pool as (T, C)."""
        x: Tensor = self.choice(self.pool[-8:])  # type: ignore[assignment]
        if len(x.shape) == 2:
            return x
        width = x.shape[-1] if x.shape else 1
        return ops.reshape(x if x.dense else ops.cont(x), shape=(x.spec.size // width, width))


# ---- moves: each writes a few calls and returns new values ------------------------------------------------------


def elementwise(g: Writer, x: Tensor) -> list[Tensor]:
    one = ops.scale(ops.sqr(x), by=0.5, bias=1.0)
    builders: list[Callable[[], Tensor]] = [
        lambda: ops.silu(x), lambda: ops.tanh(x), lambda: ops.sigmoid(x), lambda: ops.neg(x),
        lambda: ops.relu(x), lambda: ops.scale(x, by=-0.7, bias=0.1), lambda: ops.sqrt(one),
        lambda: ops.log(one), lambda: ops.exp(ops.tanh(x)), lambda: ops.div(x, one), lambda: ops.sqr(ops.tanh(x)),
        lambda: ops.add(x, x), lambda: ops.mul(x, ops.step(x)), lambda: ops.abs(x), lambda: ops.sin(x),
        lambda: ops.cos(x), lambda: ops.elu(x), lambda: ops.erf(x), lambda: ops.gelu(x), lambda: ops.gelu_quick(x),
        lambda: ops.leaky_relu(x, slope=0.1), lambda: ops.softplus(x), lambda: ops.clamp(x, low=-0.5),
        lambda: ops.mul(x, ops.sgn(x)), lambda: ops.scale(ops.cumsum(x), by=1 / x.shape[-1]),
        lambda: ops.log_soft_max(x), lambda: ops.cast(x),
    ]  # fmt: skip
    return [builders[g.number(0, len(builders))]()]


def binary(g: Writer, x: Tensor) -> list[Tensor]:
    same_shape = [t for t in g.pool if t.shape == x.shape]
    other = g.weight(x.shape[-1]) if g.rng.random() < 0.4 else g.choice(same_shape)
    a, b = (x, other) if g.rng.random() < 0.5 else (other, x)
    function = (ops.add, ops.sub, ops.mul)[g.number(0, 3)]
    result = function(a, b)  # type: ignore[arg-type]
    return [ops.tanh(result) if function is ops.mul else result]


def product(g: Writer, x: Tensor) -> list[Tensor]:
    width = g.number(1, 4) * 8
    if g.rng.random() < 0.3:
        return [ops.matmul(x, ops.transpose(g.weight(x.shape[1], width)))]
    y = ops.matmul(x, g.weight(width, x.shape[1]))
    accumulators = [t for t in g.pool if t.shape == y.shape and t.dense]
    return [ops.matmul(y, g.weight(width, width), g.choice(accumulators) if accumulators else y)]  # type: ignore[arg-type]


def batched(g: Writer, x: Tensor) -> list[Tensor]:
    y = ops.rms_norm(x, eps=1e-5)
    batch = ops.reshape(y, shape=(1, *x.shape))
    scores = ops.soft_max(ops.matmul(batch, batch), scale=x.shape[1] ** -0.5)
    return [ops.reshape(ops.matmul(scores, ops.transpose(batch)), shape=x.shape)]


def norm(g: Writer, x: Tensor) -> list[Tensor]:
    w = g.weight(x.shape[1]) if g.rng.random() < 0.7 else None
    return [ops.rms_norm(x, w, eps=1e-3), ops.norm(x, w, w, eps=1e-3)]


def gated(g: Writer, x: Tensor) -> list[Tensor]:
    width = g.number(1, 3) * 8
    gate, up = (ops.matmul(x, g.weight(width, x.shape[1])) for _ in range(2))
    return [(ops.geglu if width == 16 else ops.swiglu)(gate, up), gate]


def mixture(g: Writer, x: Tensor) -> list[Tensor]:
    count, c, f = 3, x.shape[1], 8
    shapes = (count, c), (count, f, c), (count, f, c), (count, c, f)
    return [ops.experts(x, *(g.weight(*shape) for shape in shapes), used=g.number(1, count + 1))]


def attend(g: Writer, x: Tensor) -> list[Tensor]:
    t, heads, kv, d = x.shape[0], 4, g.choice([1, 2, 4]), 8
    table = ops.rope_table(pt.constant("pos", np.arange(t), pt.i32), dims=d, base=1e4)

    def part(count: int, *, turn: bool) -> Tensor:
        heads_out = ops.reshape(ops.matmul(x, g.weight(count * d, x.shape[1])), shape=(t, count, d))
        heads_out = ops.rope(heads_out, table, neox=bool(g.number(0, 2))) if turn else heads_out
        return ops.reshape(heads_out, shape=(1, t, count, d))

    q, k, v = part(heads, turn=True), part(kv, turn=True), part(kv, turn=False)  # type: ignore[arg-type]
    y, _ = ops.attention(q, k, v, scale=d**-0.5)
    return [ops.reshape(y, shape=(t, heads * d))]


def see(g: Writer, x: Tensor) -> list[Tensor]:
    """Views of several kinds, one on top of the other."""
    t, c = x.shape
    start, length = g.number(0, t), g.number(1, t + 1)
    part = ops.narrow(x, axis=0, start=min(start, t - length), length=length)
    left_half, right_half = (
        ops.narrow(part, axis=1, start=s, length=c // 2) for s in (0, c - c // 2)
    )
    transposed = ops.transpose(part)
    first = ops.reshape(ops.narrow(x, axis=0, start=0, length=1), shape=(c,))
    wide = ops.broadcast_to(first, shape=x.shape)
    halves = ops.add(ops.tanh(left_half), ops.sigmoid(right_half))
    views = [part, halves, transposed, ops.cont(transposed), wide, _square(x)]
    return [t for t in views if t.spec.size] if c > 1 else [part]


def _square(x: Tensor) -> Tensor:
    """A square value read transposed, where its shape alone would let it be overwritten."""
    square = ops.matmul(x, x)
    return ops.add(ops.transpose(ops.tanh(square)), ops.scale(square, by=0.1))


def regions(g: Writer, x: Tensor) -> list[Tensor]:
    """Every other column of a matrix, added to another place and put there."""
    t, c = x.shape
    shape, half = (t, c // 2), {"start": (0, c % 2), "step": (1, 2)}
    part = ops.slice(x, start=(0, 0), shape=shape, step=(1, 2))
    return [
        ops.tanh(ops.acc(part, x, size=x.shape, **half)),
        ops.set(x, ops.tanh(part), shape=shape, **half),
    ]


def diagonals(g: Writer, x: Tensor) -> list[Tensor]:
    square = ops.scale(ops.matmul(ops.tanh(x), ops.tanh(x)), by=1 / x.shape[1])
    seen = ops.soft_max(ops.diag_mask_inf(square))
    return [seen, ops.diag_mask_zero(square), ops.diag(ops.cont(ops.diagonal(square)))]


def windows(g: Writer, x: Tensor) -> list[Tensor]:
    t, c = x.shape
    picture = ops.reshape(x if x.dense else ops.cont(x), shape=(1, 1, t, c))
    columns = ops.im2col(picture, window=(1, 3), padding=(0, 1))
    folded = ops.conv_2d(picture, g.weight(2, 1, 3, 3), padding=(1, 1))
    largest, wide = bool(g.number(0, 2)), min(2, c)
    pooled = ops.pool_2d(picture, largest=largest, window=(1, wide))
    mixed = ops.silu(ops.reshape(folded, shape=(2 * t, c)))
    rows, seq = ops.reshape(picture, shape=(1, t, c)), ops.reshape(g.ids(t, 3), shape=(1, t))
    convolved = ops.short_conv(rows, g.weight(c, 3), seq)
    states = ops.concat([rows, ops.tanh(rows), ops.tanh(rows)], axis=2)
    steps, decays = ops.sigmoid(g.weight(1, t, 1)), ops.neg(ops.sigmoid(g.weight(1)))
    scanned = ops.ssm_scan(states, steps, decays, g.weight(1), seq, groups=1, width=c)
    ruled = ops.delta_rule(states, ops.neg(steps), steps, seq, groups=1, width=c, eps=0.1)
    return [
        mixed,
        ops.reshape(ruled, shape=(t, c)),
        ops.reshape(convolved, shape=(t, c)),
        ops.scale(ops.reshape(scanned, shape=(t, c)), by=1 / c),
        ops.reshape(columns, shape=(t, 3 * c)),
        ops.reshape(pooled, shape=(t, c // wide)),
    ]


def reduce(g: Writer, x: Tensor) -> list[Tensor]:
    rows = ops.scale(ops.sum_rows(x), by=1 / x.shape[1])
    columns = ops.scale(ops.sum_to(x, shape=x.shape[1:]), by=1 / x.shape[0])
    return [ops.sub(x, rows), ops.mul(ops.tanh(x), columns)]


def pick(g: Writer, x: Tensor) -> list[Tensor]:
    return [ops.get_rows(x, g.ids(g.number(1, 7), x.shape[0]))]


def remember(g: Writer, x: Tensor) -> list[Tensor]:
    """Write rows of x into a state and go on from its new handle, and from what it held before."""
    count = x.shape[0] + 2
    cache = g.leaf(pt.state, (count, x.shape[1]))
    before = ops.cont(cache) if g.rng.random() < 0.3 else x
    g.before += [before] if before is not x else []
    (handle,) = ops.set_rows(cache, x, g.ids(x.shape[0], count, distinct=True))
    g.handles.append(handle)
    return [handle, before]


def drop(g: Writer, x: Tensor) -> list[Tensor]:
    key = pt.input(f"{g.prefix}key{len(g.values)}", (2,), pt.i64)
    g.values[key.label] = g.rng.integers(0, 1000, 2)
    y = ops.dropout(x, key, p=0.3, stream=g.number(0, 100))
    return [ops.mul(y, ops.tanh(y))]


MOVES = (
    elementwise, elementwise, elementwise, binary, binary, product, batched, norm, gated, attend, mixture, see, see,
    reduce, pick, remember, drop, drop, regions, diagonals, windows,
)  # fmt: skip


# ---- a whole graph -------------------------------------------------------------------------------------------


STYLES = ("none", "outputs", "updates", "clipped")


def random_case(
    seed: int, *, keep: bool = True, prefix: str = "", style: str | None = None
) -> Case:
    """Forward moves, a loss over some of them, gradients as outputs or used by updates, some other outputs.

    keep   False keeps all forward values: the same graph without recomputation
    style  what becomes of the gradients, if not what the seed says; see STYLES
    """
    g = Writer(np.random.default_rng(seed), prefix)
    g.pool.append(g.leaf(pt.input, (g.number(1, 7), 8 * g.number(1, 4))))
    g.pool.append(ops.matmul(g.pool[0], g.weight(16, g.pool[0].shape[1])))
    for _ in range(g.number(3, 13)):
        g.pool += MOVES[g.number(0, len(MOVES))](g, g.matrix())
    loss = _loss(g)
    kept_values = [*(t for t in g.pool if g.rng.random() < 0.25), *g.before]
    recompute = g.rng.random() < 0.8
    outputs = {"loss": loss} | {f"value {i}": t for i, t in enumerate(g.pool) if g.rng.random() < 0.15}  # fmt: skip
    keeping = kept_values if keep and recompute else None
    style = style or STYLES[g.number(0, len(STYLES))]
    return Case(_with_gradients(g, style, loss, outputs, keeping), g.values, keeping)


def _loss(g: Writer) -> Tensor:
    loss_inputs = [g.pool[1], g.pool[-1], *(t for t in g.pool[2:-1] if g.rng.random() < 0.4)]
    parts = [ops.scale(ops.sum(ops.sqr(t)), by=1 / t.spec.size) for t in loss_inputs]
    if g.rng.random() < 0.5:
        x, classes = g.matrix(), 11
        targets = g.ids(x.shape[0], classes)
        weights = pt.constant("mean", np.full(x.shape[0], 1 / x.shape[0]))
        head = g.weight(classes, x.shape[1])
        by_chunks = ops.linear_cross_entropy(x, head, targets, weights, chunk=2)[0]
        full_loss = ops.cross_entropy(ops.matmul(x, head), targets, weights)[0]
        parts.append(by_chunks if g.rng.random() < 0.5 else full_loss)
    total = parts[0]
    for part in parts[1:]:
        total = ops.add(total, part)
    return total


def _with_gradients(
    g: Writer, style: str, loss: Tensor, outputs: dict[str, Tensor], keep: list[Tensor] | None
) -> pt.Graph:
    reachable_weights = {leaf for leaf in pt.Graph([loss]).leaves if leaf.kind == "weight"}
    wrt = [w for w in g.weights if w in reachable_weights]
    wrt = [w for w in wrt if g.rng.random() < 0.8] or wrt
    output_bases = {t.handle.base for t in outputs.values()}
    if style == "none":
        return pt.Graph(outputs, g.handles)
    if style == "outputs":
        gradients = pt.differentiate(loss, wrt, keep)
        return pt.Graph(outputs | {f"d/{w.label}": d for w, d in gradients.items()}, g.handles)
    hyper = pt.constant("adamw", ADAMW)
    updated = [w for w in wrt if w not in output_bases]
    if style == "updates":

        def update(w: Tensor, d: Tensor) -> None:
            if w in updated:
                gate = pt.constant("open", np.ones(()))
                g.handles.extend(_either(g, w, d, hyper, gate))

        pt.differentiate(loss, wrt, keep, sink=update)
        return pt.Graph(outputs, g.handles)
    gradients, squares = pt.differentiate(loss, wrt, keep), None
    for d in gradients.values():
        squares = ops.sum_squares(d, squares)
    assert squares is not None
    gate = ops.clip_gate(squares, max_norm=1.0)
    for w in updated:
        g.handles.extend(_update(g, w, gradients[w], hyper, gate))
    return pt.Graph(outputs | {"squares": squares}, g.handles)


def _either(g: Writer, w: Tensor, d: Tensor, hyper: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
    """AdamW; or a running sum of gradients, and a step of descent along it."""
    if g.rng.random() < 0.7:
        return _update(g, w, d, hyper, gate)
    total = ops.accumulate(g.leaf(pt.state, w.shape), d, pt.constant("fresh", np.zeros(())))
    rates = pt.constant("sgd", np.array([0.1, 0.01]))
    return total, *opt_step_sgd(w, total, rates, gate, decay=bool(len(w.shape) > 1))


def _update(g: Writer, w: Tensor, d: Tensor, hyper: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
    m, v = g.leaf(pt.state, w.shape), g.leaf(pt.state, w.shape)
    g.values[v.label] = 0.1 + np.abs(g.values[v.label])
    return opt_step_adamw(w, d, m, v, hyper, gate, decay=bool(len(w.shape) > 1))
