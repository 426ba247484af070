"""Exchanges between ranks as calls, and the parts of weights that each rank updates, so that they share the moments.

All ranks run the same graph, so they meet at each exchange. Each has an equal run of every tensor: shared out by whole
tensors, one rank would keep the embedding, perhaps half of the model. A process alone is the only rank of its run, see
`distributed.current_world`. The kernels of PyTorch need the host, so none is recorded.
"""

from collections.abc import Collection, Iterator

import numpy as np

from packtrain.distributed import current_world, rank_slice
from packtrain.dtypes import f32
from packtrain.engine import ops
from packtrain.engine.ops.arrays import assigned, flatten, on_host
from packtrain.engine.ops.costs import elementwise_cost
from packtrain.engine.tensor import Spec, Tensor, constant, input, op, require, state

PART_PREFIX = "part/"  # before a weight's name: the leaf whose bytes are a part of the weight's
RankShare = tuple[int, int]  # a rank, and how many there are


def part_of_weight(w: Tensor, share: RankShare) -> Tensor | None:
    """Return a leaf for the elements of weight w that this rank updates, with as many axes; None if there are none. The
    leaf has no role, as its bytes are the weight's: see Session.overlay."""
    num_elements = len(range(w.spec.size)[rank_slice(w.spec.size, *share)])
    shape = (*(1,) * (len(w.shape) - 1), num_elements)
    return state(f"{PART_PREFIX}{w.name}", shape, w.dtype, role=None) if num_elements else None


def local_gradient_sum(w: Tensor, share: RankShare | None) -> tuple[Tensor, Tensor] | None:
    """Return leaves for this rank's parts of w and its gradient sum; None without `share` or if a rank has no part."""
    if share is None or part_of_weight(w, (share[1] - 1, share[1])) is None:
        return None
    weight_part = part_of_weight(w, share)
    assert weight_part is not None  # the last rank has the smallest
    return weight_part, state(f"g/{weight_part.name}", weight_part.shape, role="sum")


def local_parts(
    pairs: Collection[tuple[Tensor, Tensor]], share: RankShare
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's parts of weights and of their gradients, for pairs (weight, gradient)."""
    for w, g in pairs:
        weight_part, run = part_of_weight(w, share), rank_slice(w.spec.size, *share)
        if weight_part is not None:
            flat = ops.reshape(g, shape=(g.spec.size,))
            local_grad = ops.narrow(flat, axis=0, start=run.start, length=run.stop - run.start)
            yield weight_part, ops.reshape(local_grad, shape=weight_part.shape)


def unsplit_name(name: str) -> str:
    """Return the name of the moment of a whole weight, given that of a rank's part."""
    return name.replace(PART_PREFIX, "", 1)


@op(writes=(0,))
def reduce_scatter(total: Tensor, g: Tensor, fresh: Tensor, *, share: RankShare) -> Spec:
    """Begin to add up a gradient over ranks into this rank's part: total = part if fresh else total + part.

    The exchange runs beside other calls; only after `wait_for_sums` is total complete, and g free.

        total  (...)  f32   the numbers of g that `rank_slice` gives this rank
        g      (...)  f32
        fresh  ()     f32   not 0 in the first micro-batch of a step
        share  the number of this rank, and how many there are
    """
    part_size = len(range(g.spec.size)[rank_slice(g.spec.size, *share)])
    is_valid = total.spec.size == part_size and total.dtype == g.dtype == f32
    fact = f"total is {total.spec}; for {g.spec} and the share {share} it must be f32[{part_size}]"
    require(is_valid, fact)
    Spec(()).require(fresh=fresh)
    return total.spec


@reduce_scatter.kernel("numpy")
def reduce_scatter_numpy(out, total, g, fresh, *, share):
    local_part = g.reshape(-1)[rank_slice(g.size, *share)].reshape(total.shape)
    total[...] = local_part if fresh else total + local_part


@reduce_scatter.kernel("cpu")
def reduce_scatter_cpu(out, total, g, fresh, *, share):
    current_world().start_reduce_scatter(flatten(g), flatten(total), bool(fresh), share)


@reduce_scatter.kernel("torch")
def reduce_scatter_torch(out, total, g, fresh, *, share):
    if on_host(fresh):
        current_world().start_reduce_scatter(g.view(-1), total.view(-1), bool(fresh), share)


reduce_scatter.cost(elementwise_cost())


@reduce_scatter.samples
def reduce_scatter_samples():
    cases = (1, 0.0, (0, 1), 1), (70, 1.0, (0, 2), 48), (70, 0.0, (1, 2), 22)
    for n, fresh, share, part_size in cases:
        inputs = input("g", (n,)), constant("fresh", np.array(fresh))
        yield reduce_scatter(state("total", (part_size,)), *inputs, share=share)


@op(writes=(0,))
def wait_for_sums(total: Tensor, g: Tensor) -> Spec:
    """Wait until all sums over ranks are complete; g (...) f32 must live until then, total stays as it is."""
    return total.spec


@wait_for_sums.kernel("numpy")
def wait_for_sums_numpy(out, total, g):
    pass


@wait_for_sums.kernel("cpu")
def wait_for_sums_cpu(out, total, g):
    current_world().wait_for_transfers()


@wait_for_sums.kernel("torch")
def wait_for_sums_torch(out, total, g):
    if on_host(total):
        current_world().wait_for_transfers()


wait_for_sums.samples(lambda: [wait_for_sums(state("total", (5,)), input("g", (8,)))])


@op()
def all_reduce(x: Tensor) -> Spec:
    """Sum a number, f32 (), over ranks in their order: every rank gets the same bits."""
    Spec(()).require(x=x)
    return x.spec


all_reduce.kernel("numpy")(assigned(lambda x: x))
all_reduce.kernel("cpu")(assigned(lambda x: current_world().total(float(x))))


@all_reduce.kernel("torch")
def all_reduce_torch(y, x):
    if on_host(x):
        y.fill_(current_world().total(float(x)))


all_reduce.samples(lambda: [all_reduce(input("x", ()))])
