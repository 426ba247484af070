"""Parts of weights that each of several ranks updates, so that the ranks share the moments.

Each rank has an equal run of every tensor: shared out by whole tensors, one rank would keep the embedding, perhaps half
of the model.
"""

from collections.abc import Collection, Iterator

from packtrain.distributed import rank_slice
from packtrain.engine import ops
from packtrain.engine.tensor import Tensor, state

PART_PREFIX = "part/"  # before a weight's name: the leaf whose bytes are a part of the weight's
RankShare = tuple[int, int]  # a rank, and how many there are


def part_of_weight(w: Tensor, share: RankShare) -> Tensor | None:
    """Return a leaf for the rank's numbers of a weight, with as many axes; None if there are none. The leaf has no
    role, as its bytes are the weight's: see Session.overlay."""
    num_elements = len(range(w.spec.size)[rank_slice(w.spec.size, *share)])
    shape = (*(1,) * (len(w.shape) - 1), num_elements)
    return state(f"{PART_PREFIX}{w.name}", shape, w.dtype, role=None) if num_elements else None


def local_gradient_sum(w: Tensor, share: RankShare | None) -> tuple[Tensor, Tensor] | None:
    """Return the rank's part of a weight and of its gradient sum; None if some rank would have no part."""
    if share is None or part_of_weight(w, (share[1] - 1, share[1])) is None:
        return None
    weight_part = part_of_weight(w, share)
    assert weight_part is not None  # the last rank has the smallest
    return weight_part, state(f"g/{weight_part.name}", weight_part.shape, role="sum")


def local_parts(
    pairs: Collection[tuple[Tensor, Tensor]], share: RankShare
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rank's parts of weights and of their gradients."""
    for w, g in pairs:
        weight_part, run = part_of_weight(w, share), rank_slice(w.spec.size, *share)
        if weight_part is not None:
            flat = ops.reshape(g, shape=(g.spec.size,))
            local_grad = ops.narrow(flat, axis=0, start=run.start, length=run.stop - run.start)
            yield weight_part, ops.reshape(local_grad, shape=weight_part.shape)


def unsplit_name(name: str) -> str:
    """Return the name of a weight's moment, given the name of a part's moment."""
    return name.replace(PART_PREFIX, "", 1)
