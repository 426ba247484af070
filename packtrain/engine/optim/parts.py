"""Updates of a part of each weight: what one of several processes does that share out the moments."""

from collections.abc import Collection, Iterator

from packtrain.distributed import part_of
from packtrain.engine import ops
from packtrain.engine.tensor import Tensor, state

PART = "part/"  # before the name of a weight: the leaf whose bytes are a part of the weight's
Share = tuple[int, int]  # the number of a process, and how many there are


def part_of_weight(w: Tensor, share: Share) -> Tensor | None:
    """A leaf for the process's numbers of a weight, with as many axes; None if there are none. It has no role, as
    its bytes are the weight's: see Session.overlay."""
    count = len(range(w.spec.size)[part_of(w.spec.size, *share)])
    shape = (*(1,) * (len(w.shape) - 1), count)
    return state(f"{PART}{w.name}", shape, w.dtype, role=None) if count else None


def own_sum(w: Tensor, share: Share | None) -> tuple[Tensor, Tensor] | None:
    """The process's part of a weight and of the sum of its gradients; None where some process would have none."""
    if share is None or part_of_weight(w, (share[1] - 1, share[1])) is None:
        return None
    part = part_of_weight(w, share)
    assert part is not None  # the last process has the smallest
    return part, state(f"g/{part.name}", part.shape, role="sum")


def parts(
    pairs: Collection[tuple[Tensor, Tensor]], share: Share
) -> Iterator[tuple[Tensor, Tensor]]:
    """The process's parts of weights and their gradients."""
    for w, g in pairs:
        part, run = part_of_weight(w, share), part_of(w.spec.size, *share)
        if part is not None:
            flat = ops.reshape(g, shape=(g.spec.size,))
            local_grad = ops.narrow(flat, axis=0, start=run.start, length=run.stop - run.start)
            yield part, ops.reshape(local_grad, shape=part.shape)


def whole_name(name: str) -> str:
    """The name of a moment of a weight, from that of a part of the weight."""
    return name.replace(PART, "", 1)
