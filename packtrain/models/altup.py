"""Several residual streams, of which a block computes with the first and guesses the others: AltUp, as in Gemma 3n.

Streams are one tensor (..., S, C), so that a plan saves or recomputes them together. A block predicts streams from each
other, by coefficients per token, computes with the first prediction, and corrects all by that prediction's error.
Coefficients are few numbers: full tunes train them, adapters leave them out. Baykal et al. 2023, arXiv 2301.13310."""

from packtrain.engine import ops
from packtrain.engine.tensor import Tensor, named
from packtrain.models.activation_rounding import matmul_weight
from packtrain.models.arch.architecture import STREAMS_IN, STREAMS_OUT
from packtrain.models.block_weights import BlockBuilder
from packtrain.models.config import Config
from packtrain.models.lora_weights import Weights

NORM_EPS = 1e-20  # added to mean squares, so that their roots have a slope at 0


def spread(config: Config, w: Weights, h: Tensor) -> Tensor:
    """Make S streams (..., S, C) from embeddings h (..., C): h, and S - 1 projections of h scaled to h's norm."""
    projections = [
        match_norm(_project_stream(config, w, STREAMS_IN, n, h), h)
        for n in range(config.traits.num_streams - 1)
    ]
    return named("streams", stack_streams([h, *projections]))


def merge_streams(config: Config, w: Weights, h: Tensor) -> Tensor:
    """Merge streams to one (..., C): the mean of the first and of the others' projections with the first's norm."""
    summed_streams = first_stream = stream_at(h)
    for n in range(config.traits.num_streams - 1):
        projection = _project_stream(config, w, STREAMS_OUT, n, stream_at(h, n + 1))
        summed_streams = ops.add(summed_streams, match_norm(projection, first_stream))
    return named("merged", ops.scale(summed_streams, by=1 / config.traits.num_streams))


def predict_streams(block: BlockBuilder, h: Tensor) -> Tensor:
    """Predict what a block makes of streams h (..., S, C) (AltUp): h plus a learned mix of all streams for each."""
    num_streams = block.config.traits.num_streams
    rates = block.linear("altup_predict_coef", route_stream(block, stream_at(h)))
    rates = ops.reshape(rates, shape=(*rates.shape[:-1], num_streams, num_streams))
    return block.saved(block.named("altup_predicted", ops.matmul(rates, ops.transpose(h), h)))


def correct(block: BlockBuilder, predicted: Tensor, y: Tensor) -> Tensor:
    """Correct predicted streams (..., S, C) at learned rates by y - stream 0, y (..., C) made from that stream."""
    correction_rates = block.linear("altup_correct_coef", route_stream(block, y))
    correction_rates = ops.scale(correction_rates, by=1.0, bias=1.0)
    short = block.saved(ops.sub(y, stream_at(predicted)))
    moves = ops.mul(_row(short), ops.reshape(correction_rates, shape=(*correction_rates.shape, 1)))
    return block.saved(block.named("altup_corrected", ops.add(moves, predicted)))


def route_stream(block: BlockBuilder, x: Tensor) -> Tensor:
    """Return AltUp's router activations (..., S) of a residual stream x (..., C), which give the rates of mixing."""
    router_input = ops.scale(block.norm("altup_router_norm", x), by=1 / x.shape[-1])
    return block.saved(ops.tanh(block.linear("altup_router", block.saved(router_input))))


def add_to_others(h: Tensor, y: Tensor) -> Tensor:
    """Add y (..., C) to all streams of h (..., S, C) but the first."""
    axis = len(h.shape) - 2
    other_streams = ops.narrow(h, axis=axis, start=1, length=h.shape[axis] - 1)
    return stack_streams([stream_at(h), ops.add(other_streams, _row(y))])


def stream_at(h: Tensor, stream_index: int = 0) -> Tensor:
    """Return the residual stream number `stream_index` (..., C), from 0, of several, h (..., S, C)."""
    stream = ops.cont(ops.narrow(h, axis=len(h.shape) - 2, start=stream_index, length=1))
    return ops.reshape(stream, shape=(*h.shape[:-2], h.shape[-1]))


def stack_streams(streams: list[Tensor]) -> Tensor:
    """Concatenate streams along axis -2: each (..., C), or several (..., N, C)."""
    num_axes = len(streams[0].shape)
    return ops.concat([_row(x) if len(x.shape) == num_axes else x for x in streams], axis=-2)


def match_norm(y: Tensor, x: Tensor) -> Tensor:
    """Scale y (..., C) to the root mean square of x."""
    rms_length = ops.sqrt(ops.scale(ops.mean_rows(ops.sqr(x)), by=1.0, bias=NORM_EPS))
    return ops.mul(ops.rms_norm(y, eps=NORM_EPS), rms_length)


def _row(x: Tensor) -> Tensor:
    """Return x (..., C) as (..., 1, C): one stream among several."""
    return ops.reshape(x, shape=(*x.shape[:-1], 1, x.shape[-1]))


def _project_stream(config: Config, w: Weights, name: str, matrix_index: int, x: Tensor) -> Tensor:
    """Compute x @ W.T of x (..., C); W: matrix `matrix_index` of weight `name` (S - 1, C, C), for stream 1 + index."""
    matrix = ops.narrow(w[f"{name}.weight"], axis=0, start=matrix_index, length=1)
    return matmul_weight(config, x, ops.reshape(matrix, shape=matrix.shape[1:]))
