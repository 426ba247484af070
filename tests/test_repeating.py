"""Calls that compiled code makes one after the other, by the entries of their kernels."""

import subprocess
import sys
import textwrap

import pytest

from packtrain.kernels.runtime.thread_pool import HAS_THREAD_POOL

pytestmark = pytest.mark.skipif(
    not HAS_THREAD_POOL, reason="kernels run with numba here, without entries"
)

SOURCE = textwrap.dedent("""
    import numpy as np
    import packtrain as pt
    from packtrain import ops
    from packtrain.dtypes import i32
    from packtrain.engine.ops.index import set_rows
    from packtrain.engine.tensor import state

    w, x, ids = pt.weight("w", (5, 64)), pt.input("x", (3, 64)), pt.input("ids", (3,), i32)
    v, norm = pt.weight("v", (64, 64)), pt.weight("norm", (64,))
    y = ops.matmul(ops.rms_norm(ops.add(ops.get_rows(w, ids), x), norm, eps=1e-6), v)
    kept = set_rows(state("kept", (9, 64), pt.dtypes.f32, "cache"), y, ids)
    z = ops.rms_norm(ops.swiglu(y, x), eps=1e-6)
    placed = pt.place(pt.Graph({"y": y, "z": z}, kept))
    session = pt.Session()
    run = session.executor(placed)
    random = np.random.default_rng(1)
    session.set({n: random.standard_normal(s).astype("f") for n, s in
                 {"w": (5, 64), "v": (64, 64), "norm": 64}.items()})

    def given(*ids):
        return {"ids": np.array(ids, np.int32), "x": random.standard_normal((3, 64)).astype("f")}
""")


def program_output(body: str) -> str:
    """What a program prints that has this graph, in a process whose kernels come from the cache."""
    command = [sys.executable, "-c", SOURCE + textwrap.dedent(body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_runs_of_compiled_code_give_the_bits_of_single_calls():
    body = """
        other = pt.Session()
        single = other.executor(placed)
        other.set({name: session.get(name) for name in ("w", "v", "norm")})
        for number in range(4):
            one = given(4, 2, 1)
            got, want = run(one), single(one, stop=lambda: False)  # calls with `stop` are made one by one
            assert all(np.array_equal(got[name], want[name]) for name in want), number
            assert np.array_equal(session.get("kept"), other.get("kept"))
        names = [step.op.name for step, row in zip(placed.steps, run.table.entry_rows) if row[0]]
        print(*names)
    """
    assert program_output(body) == "get_rows rms_norm matmul set_rows swiglu rms_norm"


def test_an_index_that_is_too_large_is_named_and_the_next_run_is_right():
    body = """
        first = given(4, 2, 1)
        want = run(first)
        run(first)
        try:
            run(given(4, 2, 9))
        except IndexError as error:
            lines = str(error).splitlines()
        again = run(first)
        assert all(np.array_equal(again[name], want[name]) for name in want)
        print(lines[0])
        print("ids" in "".join(lines[2:]), "norm" in "".join(lines[2:]))
    """
    expected = "get_rows: index 9 at position 2 is outside the 5 rows\nTrue False"
    assert program_output(body) == expected


def test_what_no_wanted_output_needs_is_left_out():
    body = """
        first, then = given(4, 2, 1), given(0, 2, 1)
        run(first)
        part = run(then, only={"y"})
        there = run.outputs["z"][1].copy()
        whole = run(then)
        assert part.keys() == {"y"} and np.array_equal(whole["y"], part["y"])
        assert not np.array_equal(there, whole["z"])
        print(run.table.num_needed_calls({"y"}), run.table.num_needed_calls(None), len(run.calls))
    """
    assert program_output(body) == "5 7 7"


def test_a_replaced_call_is_made():
    body = """
        run(given(4, 2, 1))
        seen = []
        calls = list(run.calls)
        run.calls = [lambda i=i, call=call: (seen.append(i), call())[1] for i, call in enumerate(calls)]
        run(given(4, 2, 1))
        print(*seen)
    """
    assert program_output(body) == "0 1 2 3 4 5 6"


HELPERS_SOURCE = """
    from packtrain.dtypes import BLOCK_TYPES, f16
    from packtrain.engine.ops.rounded import matmul_rounded

    def weights(name, rows, k=96):
        if name == "f16":
            return pt.engine.tensor.constant("w", random.standard_normal((rows, k)).astype(np.float16), f16)
        kind = BLOCK_TYPES[name]
        bits = random.integers(0, 256, (rows, k // kind.block, kind.block_nbytes), np.uint8)
        bits[..., :4] = np.float16([0.01, 0.02]).view(np.uint8)
        return pt.engine.tensor.constant("w", bits.view(kind.numpy)[..., 0], kind)

    def outcomes(graph, **given):
        placed = pt.place(graph)
        run, single = pt.Session().executor(placed), pt.Session().executor(placed)
        for number in range(3):
            got, want = run(given), single(given, stop=lambda: False)
            assert all(np.array_equal(got[name], want[name]) for name in want), number
        return run, want
"""


def test_products_of_the_same_rows_are_one_call_with_the_same_bits():
    body = """
        for m in (1, 3):
            x, acc = pt.input("x", (m, 96)), pt.input("acc", (m, 40))
            given = {"x": random.standard_normal((m, 96)).astype("f"), "acc": np.ones((m, 40), "f")}
            for name in ("q4_0", "q8_0", "f16"):
                q, k = ops.matmul(x, weights(name, 40), acc), ops.matmul(x, weights(name, 7))
                v = ops.matmul(x, weights(name, 300))
                found = {"q": q, "k": k, "v": v}
                if name != "f16":
                    found |= {"a": matmul_rounded(x, weights(name, 9)), "b": matmul_rounded(x, weights("q5_1", 33))}
                run, _ = outcomes(pt.Graph(found), **given)
                if name != "q8_0":  # without VNNI f32 is multiplied in f32
                    print(m, name, *(int(row[0] == 1) for row in run.table.entry_rows))
    """
    stdout = program_output(textwrap.dedent(HELPERS_SOURCE) + textwrap.dedent(body))
    assert stdout.splitlines() == [
        "1 q4_0 0 1 1 0 0",
        "1 f16 0 1 1",
        "3 q4_0 0 1 1 0 0",
        "3 f16 0 0 0",
    ]


def test_products_that_write_over_weights_of_others_are_not_joined():
    body = """
        from functools import partial
        from packtrain import kernels
        from packtrain.kernels.matmul.fused_products import join_calls

        x, room = np.ones((1, 96), np.float32), np.zeros((3, 40 * 96), np.float16)
        first, second, third = (one.reshape(40, 96).view(np.uint8) for one in room)
        own, over = np.empty((2, 1, 40), np.float32), first.reshape(-1)[:160].view(np.float32).reshape(1, 40)

        def call(y, w):
            return partial(kernels.packed.product, y, x, f16.number, w, False, 0)

        for second_call in (own[1], second), (over, second), (own[1], first):
            calls = [call(own[0], first), call(*second_call)]
            print(*((start, end) for start, end, _ in join_calls(calls)))
    """
    stdout = program_output(textwrap.dedent(HELPERS_SOURCE) + textwrap.dedent(body))
    assert stdout.splitlines() == ["(0, 2)", "", "(0, 2)"]


def test_a_joined_call_that_fails_is_made_one_by_one():
    body = """
        x = pt.input("x", (1, 96))
        given = {"x": random.standard_normal((1, 96)).astype("f")}
        products = {name: ops.matmul(x, weights("q4_0", 40)) for name in "abc"}
        run, want = outcomes(pt.Graph(products), **given)
        assert (run.table.entry_rows[:, 0] == 1).tolist() == [False, True, True]
        for _, array in run.outputs.values():
            array.fill(0)
        run.table.entry_rows[0, 0] = 0  # as if it failed
        print(*run.table.run_compiled_calls(3))
        got = run(given)
        assert all(np.array_equal(got[name], want[name]) for name in want)
    """
    assert program_output(textwrap.dedent(HELPERS_SOURCE) + textwrap.dedent(body)) == "0 1 2"
