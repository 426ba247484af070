"""Code that folds the lanes of vectors to one value each."""

from llvmlite import ir

I32 = ir.IntType(32)


def fold_lanes(builder, vector, combine):
    """All lanes folded to one by halves: a fixed order on every machine."""
    return builder.extract_element(fold_vectors(builder, [vector], combine), I32(0))


def fold_vectors(builder, vectors, combine):
    """Up to 16 values folded together, each as by `fold`: the first lanes of one, in their order."""
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
    """One value or two as parts of 2 * width: both halves of each part combined."""
    starts = range(0, len(vectors) * vectors[0].type.count, 2 * width)
    halves = (
        ir.Constant(ir.VectorType(I32, len(starts) * width), [s + i for s in starts for i in half])
        for half in (range(width), range(width, 2 * width))
    )
    shuffled = (builder.shuffle_vector(vectors[0], vectors[-1], lane_half) for lane_half in halves)
    return combine(builder, *shuffled)
