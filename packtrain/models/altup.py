"""Several residual streams, of which a block computes with the first and guesses the others: AltUp, as in Gemma 3n.

Streams are one tensor (..., S, C). A block predicts them from each other, by coefficients for each token, computes with
the first prediction, and corrects all by how far that was off. Baykal et al. 2023, arXiv 2301.13310; gemma3n.cpp.
"""

from packtrain.engine import ops
from packtrain.engine.tensor import Tensor, named
from packtrain.models.activation_rounding import product
from packtrain.models.arch.architecture import STREAMS_IN, STREAMS_OUT
from packtrain.models.block_weights import Block, Weights
from packtrain.models.config import Config

TINY = 1e-20  # added to mean squares, whose roots have slopes everywhere then


def spread(config: Config, w: Weights, h: Tensor) -> Tensor:
    """The streams of embeddings h (..., C): h, and products with h that are as long as it."""
    projections = [
        like(_turned(config, w, STREAMS_IN, n, h), h) for n in range(config.traits.streams - 1)
    ]
    return named("streams", stacked([h, *projections]))


def merged(config: Config, w: Weights, h: Tensor) -> Tensor:
    """One stream (..., C): the mean of the first and of products with the others that are as long as it."""
    total = target = one(h)
    for n in range(config.traits.streams - 1):
        total = ops.add(total, like(_turned(config, w, STREAMS_OUT, n, one(h, n + 1)), target))
    return named("merged", ops.scale(total, by=1 / config.traits.streams))


def predicted(part: Block, h: Tensor) -> Tensor:
    """h (..., S, C), plus for each stream a mix of all of them."""
    count = part.config.traits.streams
    rates = part.linear("altup_predict_coef", routed(part, one(h)))
    rates = ops.reshape(rates, shape=(*rates.shape[:-1], count, count))
    return part.saved(part.named("altup_predicted", ops.matmul(rates, ops.transpose(h), h)))


def corrected(part: Block, guess: Tensor, y: Tensor) -> Tensor:
    """The guess (..., S, C), moved towards y (..., C) from what it has in the first place, each stream at its rate."""
    rates = part.linear("altup_correct_coef", routed(part, y))
    rates = ops.scale(rates, by=1.0, bias=1.0)
    short = part.saved(ops.sub(y, one(guess)))
    moves = ops.mul(_row(short), ops.reshape(rates, shape=(*rates.shape, 1)))
    return part.saved(part.named("altup_corrected", ops.add(moves, guess)))


def routed(part: Block, x: Tensor) -> Tensor:
    """What rates are made from, (..., S), of one stream."""
    read = ops.scale(part.norm("altup_router_norm", x), by=1 / x.shape[-1])
    return part.saved(ops.tanh(part.linear("altup_router", part.saved(read))))


def added(h: Tensor, y: Tensor) -> Tensor:
    """h (..., S, C) with y (..., C) added to all streams but the first."""
    axis = len(h.shape) - 2
    rest = ops.narrow(h, axis=axis, start=1, length=h.shape[axis] - 1)
    return stacked([one(h), ops.add(rest, _row(y))])


def one(h: Tensor, number: int = 0) -> Tensor:
    """A stream (..., C) of h (..., S, C)."""
    part = ops.cont(ops.narrow(h, axis=len(h.shape) - 2, start=number, length=1))
    return ops.reshape(part, shape=(*h.shape[:-2], h.shape[-1]))


def stacked(parts: list[Tensor]) -> Tensor:
    """Streams one after the other: each (..., C), or several (..., N, C)."""
    axes = len(parts[0].shape)
    return ops.concat([_row(x) if len(x.shape) == axes else x for x in parts], axis=-2)


def like(y: Tensor, x: Tensor) -> Tensor:
    """y (..., C), as long as x."""
    length = ops.sqrt(ops.scale(ops.mean_rows(ops.sqr(x)), by=1.0, bias=TINY))
    return ops.mul(ops.rms_norm(y, eps=TINY), length)


def _row(x: Tensor) -> Tensor:
    return ops.reshape(x, shape=(*x.shape[:-1], 1, x.shape[-1]))


def _turned(config: Config, w: Weights, name: str, number: int, x: Tensor) -> Tensor:
    """x (..., C) times one of the matrices (S - 1, C, C)."""
    matrix = ops.narrow(w[f"{name}.weight"], axis=0, start=number, length=1)
    return product(config, x, ops.reshape(matrix, shape=matrix.shape[1:]))
