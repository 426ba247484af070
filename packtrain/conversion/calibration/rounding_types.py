"""Element types of single matrices: parsed from --tensor-type, and larger ones that would lose less."""

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from packtrain.common.errors import InputError
from packtrain.dtypes import MERGED, Dtype
from packtrain.gguf import Entry

# share of the bytes of all matrices that is enlarged first, from those that lose most
SHARE = 1 / 3


def bits(dtype: Dtype) -> float:
    return 8 * dtype.block_nbytes / dtype.block


def kind_of(name: str) -> str:
    """The name of a tensor within its block: ffn_down of blk.3.ffn_down.weight."""
    return name.split(".", 2)[-1].removesuffix(".weight") if name.startswith("blk.") else name


def named_types(
    texts: Iterable[str], names: Iterable[str], entries: Mapping[str, Entry]
) -> dict[str, Dtype]:
    """Types of these tensors from texts NAME=TYPE; the last match counts. Raises InputError."""
    chosen_types, names = dict[str, Dtype](), list(names)
    for text in texts:
        pattern, _, type_name = text.rpartition("=")
        dtype = next((d for d in MERGED if d.name.lower() == type_name.lower()), None)
        if dtype is None:
            supported_types = ", ".join(map(str, MERGED))
            raise InputError(
                f"--tensor-type {text}: it must be NAME=TYPE, with a type of {supported_types}"
            )
        matching = [n for n in names if fnmatchcase(n, pattern) or fnmatchcase(kind_of(n), pattern)]
        if not matching:
            kinds = ", ".join(dict.fromkeys(map(kind_of, names)))
            raise InputError(
                f"--tensor-type {text}: no changed matrix has this name; there are {kinds}"
            )
        wide = next((n for n in matching if entries[n].shape[-1] % dtype.block), None)
        if wide is not None:
            raise InputError(
                f"--tensor-type {text}: {wide} has {entries[wide].shape[-1]} columns, which do not fill blocks"
                f" of {dtype.block}; choose another type"
            )
        chosen_types |= dict.fromkeys(matching, dtype)
    return chosen_types


def larger(
    stored: Mapping[str, Dtype], entries: Mapping[str, Entry], errors: Mapping[str, float]
) -> Iterator[dict[str, Dtype]]:
    """Larger types by kind of matrix, to try in turn: one step up for those that lose most, then the most for all.

    stored  types now;  errors  what each loses
    """
    kinds: dict[str, list[str]] = {}
    for name in stored:
        kinds.setdefault(kind_of(name), []).append(name)
    lost = {kind: max(errors.get(n, 1.0) for n in names) for kind, names in kinds.items()}
    nbytes = {kind: sum(entries[n].nbytes for n in names) for kind, names in kinds.items()}
    first, nbytes_limit = dict[str, Dtype](), SHARE * sum(nbytes.values())
    for kind in sorted(kinds, key=lambda kind: -lost[kind]):
        step = _above(stored, entries, kinds[kind])
        if step and sum(nbytes[k] for k in first) < nbytes_limit:
            first[kind] = step[0]
    if first:
        yield first
    largest = {kind: step[-1] for kind in kinds if (step := _above(stored, entries, kinds[kind]))}
    if largest and largest != first:
        yield largest


def _above(
    stored: Mapping[str, Dtype], entries: Mapping[str, Entry], names: list[str]
) -> list[Dtype]:
    """Types with more bits than any of these, up to 8.5 bits (q8_0), or 16."""
    current_bits, width = max(bits(stored[n]) for n in names), entries[names[0]].shape[-1]
    fitting = (d for d in MERGED if bits(d) > current_bits and width % d.block == 0)
    larger_types = sorted(fitting, key=bits)
    return [d for d in larger_types if d.chosen] or [d for d in larger_types if bits(d) == 16][:1]
