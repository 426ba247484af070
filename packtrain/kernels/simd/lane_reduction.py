"""Emit code that folds the lanes of vectors to one value each."""

from llvmlite import ir

I32 = ir.IntType(32)


def fold_lanes(builder, vector, combine):
    """Fold all lanes of a vector by combine(builder, a, b) to one value, by halves: a fixed order on every machine."""
    return builder.extract_element(fold_vectors(builder, [vector], combine), I32(0))


def fold_vectors(builder, vectors, combine):
    """Fold up to 16 vectors together, each as by `fold_lanes`, into the first lanes of one vector, in order."""
    width = vectors[0].type.count
    while width > 1:
        width //= 2
        if len(vectors) > 1 and len(vectors) % 2:
            vectors = [*vectors, vectors[-1]]
        group_size = min(2, len(vectors))
        vector_groups = (vectors[at : at + group_size] for at in range(0, len(vectors), group_size))
        vectors = [fold_halves(builder, pair, width, combine) for pair in vector_groups]
    return vectors[0]


def fold_halves(builder, vectors, width, combine):
    """Emit combine(lower half, upper half) of each part of 2 * `width` lanes, in one vector or two of `vectors`."""
    starts = range(0, len(vectors) * vectors[0].type.count, 2 * width)
    halves = (
        ir.Constant(ir.VectorType(I32, len(starts) * width), [s + i for s in starts for i in half])
        for half in (range(width), range(width, 2 * width))
    )
    shuffled = (builder.shuffle_vector(vectors[0], vectors[-1], lane_half) for lane_half in halves)
    return combine(builder, *shuffled)
