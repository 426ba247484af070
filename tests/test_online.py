"""ggml's allocator: traces made by hand from its rules, offset by offset."""

import numpy as np
import pytest

from tests.online import BARRIER, Allocator, BufferUse, NoSpace, best_fit, replay_steps

FULL = 1000  # bytes of the allocators below

# name: what is done, in order. `a 30 @0` takes 30 bytes for a and gets offset 0, `-a` gives them back.
TRACES = {
    "one after the other": "a 30 @0, b 10 @30, c 20 @40, d 5 @60",
    "the smallest block that fits": "a 30 @0, b 10 @30, c 20 @40, d 10 @60, -a, -c, e 20 @40, f 15 @0, g 15 @15",
    "what is left of a block is a block": "a 30 @0, b 10 @30, -a, c 20 @0, d 10 @20, e 1 @40",
    "among equal blocks the last": "a 9 @0, b 1 @9, c 9 @10, d 1 @19, e 9 @20, f 1 @29, -a, -e, -c, g 9 @20, h 9 @10",
    "a smaller block before a later one": "a 10 @0, b 1 @10, c 20 @11, d 1 @31, -a, -c, e 10 @0",
    "the last block if no other fits": "a 10 @0, b 10 @10, -a, c 11 @20, d 10 @0",
    "the last block only then": "a 900 @0, b 10 @900, -a, c 1 @0, d 90 @1, e 809 @91, f 90 @910",
    "the last block is what comes last": "a 500 @0, b 400 @500, c 100 @900, -a, -c, d 100 @0, -b, f 800 @100",
    "the last block fits exactly": "a 990 @0, b 10 @990, -b, c 10 @990",
    "merged to the left": "a 10 @0, b 10 @10, c 1 @20, -a, -b, d 20 @0",
    "merged to the right": "a 10 @0, b 10 @10, c 1 @20, -b, -a, d 20 @0",
    "merged on both sides": "a 10 @0, b 10 @10, c 10 @20, d 1 @30, -a, -c, -b, e 30 @0",
    "merged with the last block": "a 10 @0, b 10 @10, -b, c 990 @10",
    "not merged over what is in use": "a 10 @0, b 1 @10, c 10 @11, d 1 @21, -a, -c, e 20 @22",
    "all given back is one block": "a 1 @0, b 2 @1, c 3 @3, d 4 @6, -c, -a, -d, -b, e 1000 @0",
}  # fmt: skip


def replay_trace(allocator: Allocator, trace: str) -> None:
    allocations: dict[str, tuple[int, int]] = {}
    for act in trace.split(", "):
        if act.startswith("-"):
            allocator.release(*allocations.pop(act[1:]))
        else:
            name, size, expected_offset = act.split()
            allocations[name] = allocator.take(int(size)), int(size)
            assert allocations[name][0] == int(expected_offset[1:]), act


@pytest.mark.parametrize("name", TRACES)
def test_blocks_go_where_ggml_puts_them(name: str) -> None:
    allocator = Allocator(nbytes=FULL)
    replay_trace(allocator, TRACES[name])
    allocator.reset()
    assert allocator.free == [(0, FULL)] and allocator.nbytes_used == 0
    replay_trace(allocator, TRACES[name])


@pytest.mark.parametrize("name", TRACES)
def test_alignment_scales_everything(name: str) -> None:
    """In units of 32 bytes: sizes are rounded up to them, a base that is none of them is skipped to the next."""
    scaled = " ".join(
        (f"@{32 * int(w[1:]) + 24}" if w.startswith("@") else f"{32 * int(w) - 31}" if w.isdigit() else w)
        + "," * word.endswith(",")
        for word in TRACES[name].split()
        for w in [word.rstrip(",")]
    )  # fmt: skip
    replay_trace(Allocator(alignment=32, nbytes=32 * FULL + 24, base=8), scaled)


def test_free_blocks_after_each_merge() -> None:
    allocator = Allocator(nbytes=50)
    for _ in range(5):
        allocator.take(10)
    seen = []
    for offset in (10, 30, 0, 20, 40):
        allocator.release(offset, 10)
        seen.append(list(allocator.free))
    assert seen == [
        [(10, 10)],
        [(10, 10), (30, 10)],
        [(0, 20), (30, 10)],
        [(0, 40)],
        [(0, 50)],
    ]


@pytest.mark.parametrize("offset", [16, 24, 0, 48])
def test_bytes_that_are_free_are_not_released_again(offset: int) -> None:
    """Twice, in part, around a block, or beyond the end of the buffer."""
    allocator = Allocator(nbytes=48)
    offsets = [allocator.take(16) for _ in range(3)]
    allocator.release(offsets[1], 16)
    before = [*allocator.free]
    with pytest.raises(ValueError, match="are not all taken"):
        allocator.release(offset, 24 if offset in (0, 24) else 16)
    assert allocator.free == before


def test_a_size_is_at_least_0() -> None:
    with pytest.raises(ValueError, match="-5 bytes: a size is at least 0"):
        Allocator(nbytes=48).take(-5)


def test_the_most_that_was_used() -> None:
    allocator = Allocator(alignment=16)
    first, second = allocator.take(10), allocator.take(17)
    assert (first, second, allocator.nbytes_used) == (0, 16, 48)
    allocator.release(second, 17)
    allocator.take(1)
    assert allocator.nbytes_used == 48


def test_no_space_names_both_sizes() -> None:
    allocator = Allocator(alignment=32, nbytes=256, base=8)
    with pytest.raises(NoSpace, match="256 bytes are needed, the largest free block has 232"):
        allocator.take(232)
    assert allocator.take(224) == 24
    with pytest.raises(NoSpace, match="32 bytes are needed, the largest free block has 8"):
        allocator.take(1)
    with pytest.raises(NoSpace, match="largest free block has 0"):
        Allocator(alignment=64, nbytes=10, base=1).take(1)


def test_an_alignment_is_a_power_of_two() -> None:
    for alignment in (0, 3, -2):
        with pytest.raises(ValueError, match="power of two"):
            Allocator(alignment=alignment)


@pytest.mark.parametrize("seed", range(10))
def test_measuring_gives_the_offsets_of_the_real_run(seed: int) -> None:
    """With what was measured and room for one more alignment, as ggml asks for, so that there is a last block."""

    def run(allocator: Allocator) -> list[int]:
        rng = np.random.default_rng(seed)
        live_blocks: list[tuple[int, int]] = []
        offsets = []
        for _ in range(200):
            if live_blocks and rng.random() < 0.5:
                allocator.release(*live_blocks.pop(int(rng.integers(len(live_blocks)))))
            else:
                size = int(rng.integers(1, 300))
                offsets.append(allocator.take(size))
                live_blocks.append((offsets[-1], size))
        return offsets

    measuring = Allocator(alignment=32)
    expected_offsets = run(measuring)
    assert run(Allocator(alignment=32, nbytes=measuring.nbytes_used + 32)) == expected_offsets


# ---- steps -----------------------------------------------------------------------------------------------------


def buffer_of(name: str, size: int, *reads: str, space: str = "host") -> BufferUse:
    return BufferUse({name: (space, size)}, reads)


CHAIN = [
    buffer_of("a", 10),
    buffer_of("b", 10, "a"),
    buffer_of("c", 10, "b"),
    buffer_of("d", 10, "c", "a"),
]


@pytest.mark.parametrize(
    ("sequence", "expected_offsets"),
    [
        (None, [0, 10, 20, 10]),
        ([0, 1, 2, 3], [0, 10, 20, 30]),
        ([0, 1, BARRIER, 2, 3], [0, 10, 20, 30]),
        ([0, 1, 2, BARRIER, 3], [0, 10, 20, 10]),
        ([0, BARRIER, 1, BARRIER, 2, BARRIER, 3, BARRIER], [0, 10, 20, 10]),
    ],
)
def test_bytes_are_freed_after_the_last_reader_or_at_barriers(
    sequence: list[int] | None, expected_offsets: list[int]
) -> None:
    allocators = {"host": Allocator()}
    placed = replay_steps(CHAIN, allocators, sequence)
    assert [placed[name] for name in "abcd"] == expected_offsets


def test_steps_may_be_followed_in_another_order() -> None:
    steps = [
        buffer_of("a", 10),
        buffer_of("b", 20),
        buffer_of("c", 5, "a"),
        buffer_of("d", 10, "b"),
    ]
    assert replay_steps(steps, {"host": Allocator()}) == {"a": 0, "b": 10, "c": 30, "d": 0}
    reordered_offsets = replay_steps(
        steps, {"host": Allocator()}, [1, BARRIER, 3, BARRIER, 0, BARRIER, 2]
    )
    assert reordered_offsets == {"b": 0, "d": 20, "a": 0, "c": 10}


def test_several_spaces_at_once() -> None:
    steps = [
        buffer_of("a", 10),
        buffer_of("far a", 30, "a", space="far"),
        BufferUse({"b": ("host", 10), "far b": ("far", 40)}, ["far a"]),
        buffer_of("far c", 30, space="far"),
    ]
    allocators = {"host": Allocator(), "far": Allocator(alignment=32)}
    placed = replay_steps(steps, allocators)
    assert placed == {"a": 0, "far a": 0, "b": 0, "far b": 32, "far c": 0}
    assert (allocators["host"].nbytes_used, allocators["far"].nbytes_used) == (10, 96)


def test_what_nobody_reads_stays_and_reading_twice_frees_once() -> None:
    steps = [
        buffer_of("kept", 10),
        buffer_of("x", 10),
        buffer_of("y", 10, "x", "x"),
        buffer_of("z", 10, "y"),
    ]
    assert replay_steps(steps, {"host": Allocator()}) == {"kept": 0, "x": 10, "y": 20, "z": 10}


@pytest.mark.parametrize("seed", range(10))
def test_best_fit_is_the_allocator_over_lifetimes(seed: int) -> None:
    """One buffer is made at each step; its last reader is the step before its end."""
    rng = np.random.default_rng(seed)
    n = 60
    start = np.arange(n)
    end = np.minimum(start + rng.integers(2, 12, n), n)
    end[-1] = n + 1  # the last one has no reader
    size = rng.integers(1, 100, n)
    reads = [[str(j) for j in range(n) if end[j] == i + 1 and j < i] for i in range(n)]
    steps = [buffer_of(str(i), int(size[i]), *reads[i]) for i in range(n)]
    placed = replay_steps(steps, {"host": Allocator()})
    assert best_fit(start, end, size).tolist() == [placed[str(i)] for i in range(n)]
