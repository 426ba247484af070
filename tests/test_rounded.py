"""Activations rounded to 8 bits: what the rounding is, and what generate and eval do with it."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain import kernels, ops
from packtrain.commands import evaluate, quantize
from packtrain.context.plans import Sizes
from packtrain.dtypes import DTYPES, ROUNDABLE, Dtype, f32
from packtrain.errors import InputError
from packtrain.generation import Generator
from packtrain.models import cached, transformer
from packtrain.models.adapted import with_activations
from packtrain.models.config import Config
from packtrain.models.file import ModelFile, open_model
from packtrain.models.rounding import product
from packtrain.quant import dequantize
from packtrain.tasks.evaluate import Evaluate
from packtrain.tasks.quantize import Quantize
from packtrain.tasks.speak import Speaking, opened
from tests.test_model_file import TOKENS, save

CONFIG = Config(len(TOKENS), 64, 64, 2, 64, 4, 2)
IDS = [3, 9, 4, 11, 5, 8, 13, 6, 7, 10]


def rounded(x: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    kernels.rounded.rounded(out, x)
    return out


def test_values_are_rounded_to_multiples_of_a_127th_of_the_largest() -> None:
    x = np.linspace(-1, 1, 32, dtype=np.float32) * np.float32(127)
    x[5:8] = 0.5, 1.5, 2.4  # ties to even
    wanted = np.rint(x)
    np.testing.assert_array_equal(rounded(x), wanted)
    np.testing.assert_array_equal(rounded(x * np.float32(2**-20)), wanted * np.float32(2**-20))
    assert wanted[5:8].tolist() == [0, 2, 2]


def test_blocks_of_zeros_of_denormals_and_of_what_is_not_finite() -> None:
    x = np.zeros(128, np.float32)
    x[32:64] = 1e-42
    x[70], x[100] = np.nan, np.inf
    found = rounded(x)
    assert not found[:64].any()
    assert np.isnan(found[64:]).all()


@pytest.mark.parametrize("dtype", ROUNDABLE, ids=str)
def test_products_are_those_of_the_rounded_values(dtype: Dtype) -> None:
    """Sums over thousands of values that are as large as can be: nothing overflows or saturates."""
    k = 4096
    x = np.where(np.arange(k) % 3, 127, -127).astype(np.float32)[None]
    bits = np.full((17, k // dtype.block, dtype.block_nbytes), 0xFF, np.uint8)
    bits[3:9] = 0x80
    for place in dtype.layout.halves if dtype.layout else (0,):
        bits[..., place : place + 2] = np.float16([0.01]).view(np.uint8)
    w = bits.view(dtype.numpy)[..., 0]
    y, work = np.empty((1, 17), np.float32), np.empty(k // 128 * 80, np.float32)
    packed = w.view(np.uint8).reshape(17, -1)
    kernels.rounded.product(y, x, dtype.number, packed, False, work)
    wanted = x.astype(np.float64) @ dequantize(w).astype(np.float64).T
    np.testing.assert_allclose(y, wanted, rtol=1e-5)


@pytest.mark.parametrize("dtype", ROUNDABLE, ids=str)
def test_a_row_has_the_same_product_alone_and_among_others(dtype: Dtype) -> None:
    random, k, n = np.random.default_rng(0), 416 if dtype.block == 32 else 512, 13
    bits = random.integers(0, 256, (n, k // dtype.block, dtype.block_nbytes), np.uint8)
    for place in dtype.layout.halves if dtype.layout else (0,):
        bits[..., place : place + 2] = np.float16([0.01]).view(np.uint8)
    w = bits.reshape(n, -1)
    x, acc = (
        random.standard_normal((15, k), np.float32),
        random.standard_normal((15, n), np.float32),
    )

    def product(rows: slice) -> np.ndarray:
        y, work = acc[rows].copy(), np.empty(15 * 4 * 80, np.float32)
        kernels.rounded.product(y, x[rows], dtype.number, w, True, work)
        return y

    every = product(slice(None))  # 4 rows, 2 and 1
    alone = [product(slice(i, i + 1)) for i in range(15)]
    np.testing.assert_array_equal(every, np.concatenate(alone))
    rough = rounded(x.reshape(-1)).reshape(x.shape).astype(np.float64)
    wanted = acc + rough @ dequantize(w.view(dtype.numpy)).T
    np.testing.assert_allclose(every, wanted, rtol=1e-4, atol=1e-4)


def test_what_it_does_not_take_is_refused() -> None:
    w = pt.weight("w", (8, 40))
    with pytest.raises(pt.GraphError, match="multiple of 32"):
        ops.rounded(pt.input("x", (3, 40)))
    with pytest.raises(pt.GraphError, match="its products are not rounded"):
        ops.matmul_rounded(pt.input("x", (3, 64)), w)


# ---- models


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Path]:
    """The same model in f32 and in q8_0."""
    plain, packed = tmp_path / "plain.gguf", tmp_path / "packed.gguf"
    save(plain, CONFIG)
    quantize.run(Quantize(plain, packed, "Q8_0"))
    return {"plain": plain, "packed": packed}


def logits(model: ModelFile, chunks: tuple[int, ...]) -> np.ndarray:
    generator = Generator.of(model, 16, f32)
    for count in chunks[:-1]:
        generator.feed(IDS[len(generator.fed) : len(generator.fed) + count])
    return generator.feed(IDS[len(generator.fed) :]).copy()


def test_prompts_and_single_tokens_are_rounded_alike(models: dict[str, Path]) -> None:
    exact = open_model(models["packed"])
    rough = with_activations(exact, "q8")
    at_once, one_by_one = logits(rough, (8, 1, 1)), logits(rough, (1,) * len(IDS))
    size = np.abs(at_once).max()
    assert np.abs(at_once - one_by_one).max() < 1e-4 * size
    off = np.abs(at_once - logits(exact, (8, 1, 1))).max()
    assert 1e-4 * size < off < 0.05 * size


def test_few_rows_have_products_in_integers() -> None:
    config, w = replace(CONFIG, activations="q8"), pt.weight("w", (4, 64), DTYPES["q8_0"])
    few, many = (product(config, pt.input("x", (n, 64)), w) for n in (8, 9))
    done = [[call.op.name for call in pt.Graph({"y": y}).calls] for y in (few, many)]
    assert done == [["matmul_rounded"], ["rounded", "matmul"]]


def test_eval_takes_it_too(models: dict[str, Path], tmp_path: Path, capsys) -> None:
    (tmp_path / "t.txt").write_text("the cat the hat a bad head\n" * 40)
    said = []
    for kind in ("f32", "q8"):
        settings = Evaluate((models["packed"],), tmp_path / "t.txt", activations=kind)
        assert evaluate.run(settings) == 0
        said.append(float(capsys.readouterr().out.split("perplexity ")[1].split()[0]))
    assert said[0] != said[1]
    assert said[0] == pytest.approx(said[1], rel=0.02)


def test_a_model_without_such_a_matrix_is_refused(models: dict[str, Path]) -> None:
    with pytest.raises(InputError, match=r"--activations q8: .*plain\.gguf has no matrix of q4_0"):
        opened(Speaking(models["plain"], activations="q8"))


def test_only_long_runs_and_not_their_head_are_in_bf16() -> None:
    config, cache = replace(CONFIG, precision="bf16"), cached.Cache(200)
    for time, kinds in ((cached.EXACT, {"f32"}), (cached.EXACT + 1, {"bf16"})):
        result, handles = cached.generation(config, transformer.weights(config), time, cache)
        products = [
            call.attrs["precision"]
            for call in pt.Graph({"result": result}, handles).calls
            if call.op.name == "matmul"
        ]
        assert products.pop() == "f32"
        assert len(products) >= 7 * config.block_count and set(products) == kinds


def test_guesses_are_checked_as_they_would_be_written() -> None:
    most = next(f for f in fields(Speaking) if f.name == "draft_max").metadata["bounds"][1]
    assert Sizes.of(4096, 1 + most).next(1 + most) <= cached.EXACT
