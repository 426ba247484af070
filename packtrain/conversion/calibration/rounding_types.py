"""Types of single matrices: parsed from --tensor-type, and larger types that would lose less."""

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from packtrain.common.errors import InputError
from packtrain.dtypes import MERGEABLE, Dtype
from packtrain.gguf import TensorInfo

# share of the bytes of all matrices that is enlarged first, beginning with those that lose most
FIRST_SHARE = 1 / 3


def bits(dtype: Dtype) -> float:
    """Return the bits that a value takes in this type, its share of scales included."""
    return 8 * dtype.block_nbytes / dtype.block


def kind_of(name: str) -> str:
    """Return a tensor's name within its block: ffn_down for blk.3.ffn_down.weight."""
    return name.split(".", 2)[-1].removesuffix(".weight") if name.startswith("blk.") else name


def parse_tensor_types(
    texts: Iterable[str], names: Iterable[str], entries: Mapping[str, TensorInfo]
) -> dict[str, Dtype]:
    """Parse texts NAME=TYPE to {tensor: type} for tensors among `names`; the last match counts. Raises InputError."""
    chosen_types, names = dict[str, Dtype](), list(names)
    for text in texts:
        pattern, _, type_name = text.rpartition("=")
        dtype = next((d for d in MERGEABLE if d.name.lower() == type_name.lower()), None)
        if dtype is None:
            supported_types = ", ".join(map(str, MERGEABLE))
            fact = f"--tensor-type {text}: it must be NAME=TYPE, with a type of {supported_types}"
            raise InputError(fact)
        matching = [n for n in names if fnmatchcase(n, pattern) or fnmatchcase(kind_of(n), pattern)]
        if not matching:
            kind_names = ", ".join(dict.fromkeys(map(kind_of, names)))
            fact = f"--tensor-type {text}: no changed matrix has this name; there are {kind_names}"
            raise InputError(fact)
        misfit = next((name for name in matching if entries[name].shape[-1] % dtype.block), None)
        if misfit is not None:
            raise InputError(
                f"--tensor-type {text}: {misfit} has {entries[misfit].shape[-1]} columns, which do not fill blocks"
                f" of {dtype.block}; choose another type"
            )
        chosen_types |= dict.fromkeys(matching, dtype)
    return chosen_types


def larger_types(
    stored: Mapping[str, Dtype], entries: Mapping[str, TensorInfo], errors: Mapping[str, float]
) -> Iterator[dict[str, Dtype]]:
    """Yield {kind of matrix, such as ffn_down: larger type} to try in turn: a step for kinds with the largest relative
    `errors` (by matrix), then the largest types for all; `stored` has the present types by matrix."""
    kinds: dict[str, list[str]] = {}
    for name in stored:
        kinds.setdefault(kind_of(name), []).append(name)
    error_by_kind = {kind: max(errors.get(n, 1.0) for n in names) for kind, names in kinds.items()}
    nbytes_by_kind = {kind: sum(entries[n].nbytes for n in names) for kind, names in kinds.items()}
    first_types, nbytes_limit = dict[str, Dtype](), FIRST_SHARE * sum(nbytes_by_kind.values())
    for kind in sorted(kinds, key=lambda kind: -error_by_kind[kind]):
        step = _richer_types(stored, entries, kinds[kind])
        if step and sum(nbytes_by_kind[first_kind] for first_kind in first_types) < nbytes_limit:
            first_types[kind] = step[0]
    if first_types:
        yield first_types
    largest = {
        kind: step[-1] for kind in kinds if (step := _richer_types(stored, entries, kinds[kind]))
    }
    if largest and largest != first_types:
        yield largest


def _richer_types(
    stored: Mapping[str, Dtype], entries: Mapping[str, TensorInfo], names: list[str]
) -> list[Dtype]:
    """Return types with more bits a value than the matrices `names`, fewest first: up to q8_0, else one of 16 bits."""
    current_bits, width = max(bits(stored[name]) for name in names), entries[names[0]].shape[-1]
    fitting_types = (d for d in MERGEABLE if bits(d) > current_bits and width % d.block == 0)
    sorted_types = sorted(fitting_types, key=bits)
    return [d for d in sorted_types if d.chosen] or [d for d in sorted_types if bits(d) == 16][:1]
