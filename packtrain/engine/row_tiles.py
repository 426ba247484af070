"""Row tiles: a part of a graph that runs on a few rows at a time, so that its inner values need memory for a few rows.

`in_tiles` returns the results of a body, a graph of its own, whose inner values lie in the workspace of one call. The
backward pass runs the body again, tile by tile, and adds up gradients of what all tiles read, the first rows first.
ALST's TiledMLP (arXiv 2506.13996) and StreamBP (arXiv 2506.03077) tile in the same way.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, cast

import numpy as np

from packtrain.dtypes import TRAINABLE, f32, i32
from packtrain.engine import ops
from packtrain.engine.autodiff import as_tuple, pull_back
from packtrain.engine.backends import cpu
from packtrain.engine.executor import Executor
from packtrain.engine.graph import Graph
from packtrain.engine.interpreter import interpret
from packtrain.engine.memory_plan import Plan, make_plan
from packtrain.engine.ops.arrays import copy_acc, demand
from packtrain.engine.ops.costs import Cost, call_cost, traffic_nbytes
from packtrain.engine.placement import Placed, place
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require, state, weight

AXIS = 1  # along which inputs and results are cut: positions of (B, T, ...)
NUM_PROGRAMS = 256  # programs that stay
Indices = tuple[int, ...]
BuildBody = Callable[[Sequence[Tensor], Mapping[str, Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class TileBody:
    """A graph that computes a tile, a few rows, of the results of `tiled`; bodies of equal structure are equal.

    structure  the calls as text, without names
    count      number of tiles
    rows       leaves of the graph that hold a tile's rows; `wholes` are those that every tile reads
    results    results of a tile
    """

    structure: str
    count: int
    rows: tuple[Tensor, ...] = field(compare=False)
    wholes: tuple[Tensor, ...] = field(compare=False)
    results: tuple[Tensor, ...] = field(compare=False)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return *self.rows, *self.wholes

    def outer_spec(self, t: Tensor) -> Spec:
        """Return the spec outside the body of t, a leaf or result: of all tiles' rows joined, or t's own if a whole."""
        length = t.shape[AXIS : AXIS + 1] if t in self.wholes else (self.count * t.shape[AXIS],)
        return Spec((*t.shape[:AXIS], *length, *t.shape[AXIS + 1 :]), t.dtype)

    def __repr__(self) -> str:
        digest = hashlib.sha256(self.structure.encode()).hexdigest()[:16]
        return f"{self.count} tiles of body {digest}"


def in_tiles(
    build: BuildBody, rows: Sequence[Tensor], wholes: Mapping[str, Tensor], count: int
) -> tuple[Tensor, ...]:
    """Compute build(tiles, wholes) for `count` tiles of the rows, one after the other; return the joined results.

    build   returns different tensors (B, T / count, ...) that are no leaves
    rows    (B, T, ...), T a multiple of `count`
    wholes  tensors by name that every tile may read
    """
    fact = f"inputs have {[t.shape[AXIS] for t in rows]} rows; they must be equally many, and a multiple of {count}"
    is_valid = len({t.shape[AXIS] for t in rows}) == 1 and rows[0].shape[AXIS] % count == 0
    demand("in_tiles", is_valid, fact, *rows)
    lengths = [(t.shape[0], t.shape[AXIS] // count, *t.shape[AXIS + 1 :]) for t in rows]
    tiles = [input(f"rows.{i}", lengths[i], t.dtype) for i, t in enumerate(rows)]
    stand_ins = {
        name: weight(f"whole.{i}", t.shape, t.dtype) for i, (name, t) in enumerate(wholes.items())
    }
    results = tuple(build(tiles, stand_ins))
    graph = Graph({str(i): t for i, t in enumerate(results)})
    outer_tensors = dict(zip((*tiles, *stand_ins.values()), (*rows, *wholes.values()), strict=True))
    used_rows = tuple(t for t in tiles if t in graph.leaves)
    used_wholes = tuple(t for t in stand_ins.values() if t in graph.leaves)
    constants = [leaf for leaf in graph.leaves if leaf.value is not None]
    # the calls as text, which does not depend on names, but on constants' values
    numbers = {t: index for index, t in enumerate((*used_rows, *used_wholes, *constants))}
    lines = [f"{t.spec}{'' if t.value is None else t.value.tobytes().hex()}" for t in numbers]
    for call in graph.calls:
        reads = [None if t is None else numbers[t] for t in call.inputs]
        lines.append(f"{call.op.name} {reads} {call.attrs}")
        numbers |= {t: len(numbers) + index for index, t in enumerate(call.results)}
    structure = "\n".join([*lines, str([numbers[t] for t in graph.outputs.values()])])
    body = TileBody(structure, count, used_rows, used_wholes, results)
    return as_tuple(tiled(*(outer_tensors[t] for t in body.inputs), body=body))


@dataclass(frozen=True)
class _TileProgram:
    """The graph of one tile or of its gradients, placed and planned on the CPU; outputs and states are called out.N.

    body  the body whose leaves the graph has; that of a call may be another, but equal
    """

    body: TileBody
    placed: Placed
    plan: Plan


@lru_cache(NUM_PROGRAMS)
def _program(body: TileBody, dy_indices: Indices, dx_indices: Indices) -> _TileProgram:
    """Return the graph, placement and plan of a tile of the body, or of its gradients dx_indices from dy_indices."""
    graph = Graph({f"out.{i}": t for i, t in enumerate(body.results)})
    placed = place(_backward_graph(body, graph, dy_indices, dx_indices) if dy_indices else graph)
    return _TileProgram(body, placed, make_plan(placed))


def _backward_graph(
    body: TileBody, forward: Graph, dy_indices: Indices, dx_indices: Indices
) -> Graph:
    """Return the graph that runs the body again and computes a tile's gradients for inputs `dx_indices`, given those of
    results `dy_indices`: gradients of rows are outputs, those of wholes are sums."""
    arriving = {body.results[i]: input(f"dy.{i}", body.results[i].shape) for i in dy_indices}
    names = {body.inputs[i]: f"out.{k}" for k, i in enumerate(dx_indices)}
    gradients = dict[Tensor, Tensor]()
    pull_back(forward.calls, arriving, [*names], gradients.__setitem__)
    return _graph_with_sums(body, names, gradients)


def _graph_with_sums(
    body: TileBody, names: Mapping[Tensor, str], gradients: Mapping[Tensor, Tensor]
) -> Graph:
    """Return the graph of gradients by leaf, with these names: of rows as outputs, of wholes added to states. Attention
    adds gradients of all keys and values to the states itself: a tile has no others of their size."""
    fresh, first_fresh = input("fresh", ()), input("fresh.0", ())
    totals = {t: state(names[t], t.shape, role="sum") for t in gradients if t in body.wholes}
    num_uses, own_totals = Counter(gradients.values()), dict[Tensor, Tensor]()
    for t, total in totals.items():
        if num_uses[gradients[t]] == 1 and names[t] != "out.0":  # which may start with acc
            own_totals[gradients[t]] = total
    graph = Graph({names[t]: gradient for t, gradient in gradients.items()})
    results, add_attention = dict[Tensor, Tensor](), cast(Any, ops.attention_back_sums)

    def accumulated(computed: Sequence[Tensor]) -> Iterator[Tensor]:
        for t in (t for t in totals if gradients[t] in computed):
            is_fresh = first_fresh if names[t] == "out.0" else fresh
            gradient = results.get(gradients[t], gradients[t])
            yield ops.accumulate(totals[t], gradient, is_fresh)

    sums = [*accumulated(graph.leaves)]
    for call in graph.calls:
        inputs = [None if t is None else results.get(t, t) for t in call.inputs]
        if call.op is ops.attention_back and own_totals.keys() >= {*call.results[1:]}:
            kv_totals = [own_totals[t] for t in call.results[1:]]
            *kv_sums, dq = add_attention(*kv_totals, fresh, *inputs, **call.attrs)
            results |= zip(call.results, (dq, *kv_sums), strict=True)
            sums += kv_sums
        else:
            results |= zip(call.results, as_tuple(call.op(*inputs, **call.attrs)), strict=True)
            sums += accumulated(call.results)
    outputs = {names[t]: results.get(d, d) for t, d in gradients.items() if t in body.rows}
    return Graph(outputs, sums)


# result 0 may lie over the first rows, and over acc: a tile's rows are read before they are written
@op(inplace=(0,), takes_active=True)
def tiled(*inputs: Tensor, body: TileBody) -> tuple[Spec, ...]:
    """Run a body on tiles of the rows of its inputs, one after the other. See in_tiles."""
    _check_specs(inputs, body.inputs, body)
    return tuple(map(body.outer_spec, body.results))


def _check_specs(tensors: Sequence[Tensor], expected: Sequence[Tensor], body: TileBody) -> None:
    specs, expected_specs = (
        [*map(str, s)] for s in ((t.spec for t in tensors), map(body.outer_spec, expected))
    )
    require(specs == expected_specs, f"inputs are {specs}; the body takes {expected_specs}")


@tiled.vjp
def tiled_vjp(dy, y, *inputs, body, active):
    grads = dy if isinstance(dy, list) else [dy]
    dy_indices = tuple(i for i, d in enumerate(grads) if d is not None)
    needed = enumerate(zip(inputs, active, strict=True))
    dx_indices = tuple(i for i, (t, is_active) in needed if is_active and t.dtype in TRAINABLE)
    first, first_dy = dx_indices[0], grads[dy_indices[0]]
    if first >= len(body.rows) and inputs[first].shape == first_dy.shape:
        dx_indices = (0, *dx_indices)  # so that the first result is of rows
    tensors = *(grads[i] for i in dy_indices), *inputs
    attrs = {"body": body, "dy_indices": dy_indices, "dx_indices": dx_indices}
    results = as_tuple(tiled_back(None, *tensors, **attrs))
    by_input = dict(zip(dx_indices, results, strict=True))
    return tuple(by_input.get(i) for i in range(len(inputs)))


@op(inplace=(0, 1), acc=0)
def tiled_back(
    acc: Tensor | None = None, *tensors: Tensor, body: TileBody, dy_indices: Indices, dx_indices: Indices
) -> tuple[Spec, ...]:  # fmt: skip
    """Gradients of tiled for its inputs `dx_indices`; runs the body (a tile's graph) again, tile by tile.

    The first tensors are gradients of the results `dy_indices` of tiled, the others its inputs. A gradient for an input
    that all tiles read is summed over tiles, from the first rows on.

        acc  as the first result, to which it is added
    """
    _check_specs(tensors, (*(body.results[i] for i in dy_indices), *body.inputs), body)
    results = tuple(Spec(body.outer_spec(body.inputs[i]).shape) for i in dx_indices)
    fact = "a sum over tiles must not lie over rows, which later tiles read"
    require(dx_indices[0] < len(body.rows) or results[0] != tensors[0].spec, fact)
    results[0].require(acc=acc)
    return results


@tiled.kernel("numpy")
@tiled_back.kernel("numpy")
def tiles_numpy(out, *tensors, body, dy_indices=(), dx_indices=()):
    _run_tiles(_interpreted, _program(body, dy_indices, dx_indices), dy_indices, out, tensors)


@tiled.kernel("cpu")
@tiled_back.kernel("cpu")
def tiles_cpu(out, *tensors, body, dy_indices=(), dx_indices=(), work):
    program = _program(body, dy_indices, dx_indices)
    _run_tiles(partial(_executed, work[0]), program, dy_indices, out, tensors)


def _run_tiles(start, program, dy_indices, out, tensors):
    """Run a tile's graph (`program`) once per tile and write to `out`: its outputs are rows of results; results that
    are sums over tiles are its states. `tensors`: acc and gradients of results `dy_indices`, if any, and the inputs.

    start  returns a function that runs the program on arrays of a tile's rows by name and returns the outputs
    """
    body, results = program.body, as_tuple(out)
    acc, *tensors = tensors if dy_indices else (None, *tensors)
    names = *(f"dy.{i}" for i in dy_indices), *(t.label for t in body.inputs)
    rows = dict(zip(names, tensors, strict=True))
    wholes = {t.label: rows.pop(t.label) for t in body.wholes}
    if acc is not None and "out.0" in program.placed.graph.written:
        copy_acc(results[0], acc)
    run = start(program, wholes | {f"out.{k}": y for k, y in enumerate(results)})
    for at in range(body.count):
        tiles = {name: _tile_rows(x, at, body.count) for name, x in rows.items()}
        tiles |= {"fresh": np.float32(at == 0), "fresh.0": np.float32(at == 0 and acc is None)}
        for name, value in run(tiles).items():
            target = _tile_rows(results[int(name.removeprefix("out."))], at, body.count)
            if acc is not None and name == "out.0":
                np.add(value, _tile_rows(acc, at, body.count), out=target)
            else:
                target[...] = value


def _tile_rows(x, tile_index, count):
    length = x.shape[AXIS] // count
    return x[:, tile_index * length : (tile_index + 1) * length]


def _interpreted(program, arrays):
    """Return a function that runs the program on a tile's arrays by the specification (numpy kernels)."""
    graph, real = program.placed.graph, arrays["out.0"].dtype

    def run(tiles):
        values = interpret(graph, arrays | tiles, real)
        for name in graph.written:
            arrays[name][...] = values.pop(name)
        return values

    return run


def _executed(arena, program, arrays):
    """Return a function that runs the program on a tile's arrays; made in each run, as bound calls take megabytes."""
    executor = Executor(_TileMemory(arrays, arena), program.placed, program.plan)

    def run(tiles):
        for name, (backend, array, _) in executor.inputs.items():
            backend.write(array, tiles[name])
        executor.repeat()
        return {name: array for name, (_, array) in executor.outputs.items()}

    return run


class _TileMemory:
    """Stands in for a Session: leaves in the arrays of a call, and the arena in its workspace."""

    generation, pages = 0, None

    def __init__(self, arrays, arena):
        self.arrays = self.shared = arrays
        self.arena = arena.view(np.uint8)

    def array(self, t):
        array = self.arrays[t.base.label] if t.base.value is None else t.base.value
        return cpu.view(cpu.share(array), t.offset, t.spec, t.strides)

    def buffer(self, space, name):
        return self.arena


@tiled.workspace("cpu")
@tiled_back.workspace("cpu")
def tiles_workspace(*tensors, body, dy_indices=(), dx_indices=()):
    nbytes = _program(body, dy_indices, dx_indices).plan.arena().nbytes
    return (Spec((-(-nbytes // f32.block_nbytes),)),)


@tiled.cost
@tiled_back.cost
def tiles_cost(out, *tensors, body, dy_indices=(), dx_indices=()):
    """Return the cost of running all tiles. Attention sees on average (n + 1) / 2n of the keys in n tiles."""
    work, nbytes = dict[str, float](), 0.0
    steps = _program(body, dy_indices, dx_indices).placed.steps
    read = {t for step in steps for t in step.reads}
    for step in steps:
        cost = call_cost(step, read)
        share = (body.count + 1) / 2 if cost.is_causal else body.count
        for kind, amount in cost.work.items():
            work[kind] = work.get(kind, 0.0) + share * amount
        nbytes += body.count * traffic_nbytes(step, cost)
    return Cost(work, nbytes=nbytes)


def _sample_body(tiles, wholes):
    """Return a feed-forward of attention to all keys, and the sum of squares of each row: the body of samples."""
    (x, pos), heads = tiles, (1, tiles[0].shape[-1])
    q = ops.matmul(x, wholes["wq"])
    q, keys = (ops.reshape(t, shape=(*t.shape[:2], *heads)) for t in (q, wholes["keys"]))
    y = ops.attention(q, keys, keys, pos, wholes["key_pos"], scale=0.5)[0]
    hidden = ops.silu(ops.matmul(ops.add(x, ops.reshape(y, shape=x.shape)), wholes["up"]))
    return ops.matmul(hidden, wholes["down"], x), ops.sum_rows(ops.sqr(hidden))


@tiled.samples
def tiled_samples():
    for b, t, c, f, count in ((1, 4, 8, 16, 2), (2, 6, 8, 17, 3), (1, 70, 16, 33, 1)):
        pos = constant("pos", np.tile(np.arange(t), (b, 1)), i32)
        shapes = {"wq": (c, c), "keys": (b, t, c), "up": (f, c), "down": (c, f)}
        wholes = {name: input(name, shape) for name, shape in shapes.items()} | {"key_pos": pos}
        yield from in_tiles(_sample_body, (input("x", (b, t, c)), pos), wholes, count)


@tiled_back.samples
def tiled_back_samples():
    for y, squares in pairwise(tiled_samples()):
        if y.call is squares.call:
            dy, inputs, body = input("dy", y.shape), y.call.inputs, y.call.attrs["body"]
            dx_indices = tuple(i for i, t in enumerate(inputs) if t.dtype == f32)
            attrs, ds = {"body": body, "dx_indices": dx_indices}, input("ds", squares.shape)
            yield from tiled_back(None, dy, ds, *inputs, dy_indices=(0, 1), **attrs)
            yield from tiled_back(input("acc", y.shape), dy, *inputs, dy_indices=(0,), **attrs)
