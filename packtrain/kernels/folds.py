"""Code that folds the lanes of vectors to one value each."""

from llvmlite import ir

I32 = ir.IntType(32)


def fold(builder, value, combine):
    """All lanes folded to one by halves: a fixed order on every machine."""
    return builder.extract_element(folded(builder, [value], combine), I32(0))


def folded(builder, values, combine):
    """Up to 16 values folded together, each as by `fold`: the first lanes of one, in their order."""
    width = values[0].type.count
    while width > 1:
        width //= 2
        if len(values) > 1 and len(values) % 2:
            values = [*values, values[-1]]
        step = min(2, len(values))
        pairs = (values[at : at + step] for at in range(0, len(values), step))
        values = [halved(builder, pair, width, combine) for pair in pairs]
    return values[0]


def halved(builder, values, width, combine):
    """One value or two as parts of 2 * width: both halves of each part combined."""
    starts = range(0, len(values) * values[0].type.count, 2 * width)
    halves = (
        ir.Constant(ir.VectorType(I32, len(starts) * width), [s + i for s in starts for i in half])
        for half in (range(width), range(width, 2 * width))
    )
    shuffled = (builder.shuffle_vector(values[0], values[-1], half) for half in halves)
    return combine(builder, *shuffled)
