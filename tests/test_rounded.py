"""Activations rounded to 8 bits: what the rounding is, and what generate and eval do with it."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

import packtrain as pt
from packtrain import kernels
from packtrain.cli import evaluate, quantize
from packtrain.common.errors import InputError
from packtrain.dtypes import DTYPES, ROUNDABLE, Dtype, f32
from packtrain.engine import ops
from packtrain.engine.ops.arrays import integers_of
from packtrain.engine.tensor import input
from packtrain.inference.generator import Generator
from packtrain.inference.kv_cache.decode_plans import RunSizes
from packtrain.kernels.quant.quantized_arrays import dequantize
from packtrain.models import cached_transformer, transformer
from packtrain.models.activation_rounding import matmul_weight
from packtrain.models.config import Config
from packtrain.models.model_file import ModelFile, open_model
from packtrain.models.model_with_adapters import with_activations
from packtrain.workflows.eval_data import EvaluateSettings
from packtrain.workflows.generation_settings import GenerationSettings, opened
from packtrain.workflows.quantization import QuantizeSettings
from tests.test_model_file import TOKENS, save

CONFIG = Config(len(TOKENS), 64, 64, 2, 64, 4, 2)
IDS = [3, 9, 4, 11, 5, 8, 13, 6, 7, 10]


def rounded_values(x: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    kernels.rounded.rounded(out, x)
    return out


def test_values_are_rounded_to_multiples_of_a_127th_of_the_largest() -> None:
    x = np.linspace(-1, 1, 32, dtype=np.float32) * np.float32(127)
    x[5:8] = 0.5, 1.5, 2.4  # ties to even
    expected = np.rint(x)
    np.testing.assert_array_equal(rounded_values(x), expected)
    np.testing.assert_array_equal(
        rounded_values(x * np.float32(2**-20)), expected * np.float32(2**-20)
    )
    assert expected[5:8].tolist() == [0, 2, 2]


def test_blocks_of_zeros_of_denormals_and_of_what_is_not_finite() -> None:
    x = np.zeros(128, np.float32)
    x[32:64] = 1e-42
    x[70], x[100] = np.nan, np.inf
    result = rounded_values(x)
    assert not result[:64].any()
    assert np.isnan(result[64:]).all()


@pytest.mark.parametrize("dtype", ROUNDABLE, ids=str)
def test_products_are_those_of_the_rounded_values(dtype: Dtype) -> None:
    """Sums over thousands of values that are as large as can be: nothing overflows or saturates."""
    k = 4096
    x = np.where(np.arange(k) % 3, 127, -127).astype(np.float32)[None]
    bits = np.full((17, k // dtype.block, dtype.block_nbytes), 0xFF, np.uint8)
    bits[3:9] = 0x80
    w = with_small_scales(dtype, bits)
    y, work = np.empty((1, 17), np.float32), np.empty(k // 128 * 80, np.float32)
    kernels.rounded.product(y, x, dtype.number, w, False, 1, work)
    expected = x.astype(np.float64) @ dequantize(w.view(dtype.numpy)).astype(np.float64).T
    np.testing.assert_allclose(y, expected, rtol=1e-5)


def with_small_scales(dtype: Dtype, bits: np.ndarray) -> np.ndarray:
    """Rows of blocks of these bits."""
    for place in dtype.layout.half_offsets if dtype.layout else (0,):
        bits[..., place : place + 2] = np.float16([0.01]).view(np.uint8)
    return bits.reshape(len(bits), -1)


def random_rows(dtype: Dtype, n: int, k: int) -> np.ndarray:
    """Blocks of random bits between small scales."""
    random = np.random.default_rng(0)
    bits = random.integers(0, 256, (n, k // dtype.block, dtype.block_nbytes), np.uint8)
    return with_small_scales(dtype, bits)


def product_in_integers(
    acc: np.ndarray, x: np.ndarray, dtype: Dtype, w: np.ndarray, planes: int
) -> np.ndarray:
    """With the space for integers that an op has, and a line behind it that stays as it is."""
    y, size = acc.copy(), integers_of(input("x", x.shape), planes).size
    work = np.full(size + 256, 7, np.float32)
    kernels.rounded.product(y, x, dtype.number, w, True, planes, work[:size])
    assert (work[size:] == 7).all()
    return y


@pytest.mark.parametrize("planes", [1, 3])
@pytest.mark.parametrize("dtype", ROUNDABLE, ids=str)
def test_a_row_has_the_same_product_alone_and_among_others(dtype: Dtype, planes: int) -> None:
    random, k, n = np.random.default_rng(0), 416 if dtype.block == 32 else 512, 13
    w = random_rows(dtype, n, k)
    x, acc = (
        random.standard_normal((15, k), np.float32),
        random.standard_normal((15, n), np.float32),
    )
    products = product_in_integers(acc, x, dtype, w, planes)  # 4 rows, 2 and 1
    row_products = [
        product_in_integers(acc[i : i + 1], x[i : i + 1], dtype, w, planes) for i in range(15)
    ]
    np.testing.assert_array_equal(products, np.concatenate(row_products))
    rounded_x = rounded_values(x.reshape(-1)).reshape(x.shape) if planes == 1 else x
    expected = acc + rounded_x.astype(np.float64) @ dequantize(w.view(dtype.numpy)).T.astype(
        np.float64
    )
    assert np.abs(products - expected).max() < 1e-6 * np.abs(expected).max()


def product_of_many(acc: np.ndarray, x: np.ndarray, dtype: Dtype, w: np.ndarray) -> np.ndarray:
    """The same by the tiles of many rows."""
    y, size = acc.copy(), integers_of(input("x", x.shape), 1).size
    work = np.full(size + 256, 7, np.float32)
    kernels.rounded.product_of_many(y, x, dtype.number, w, True, work[:size])
    assert (work[size:] == 7).all()
    return y


@pytest.mark.parametrize("dtype", ROUNDABLE, ids=str)
def test_many_rows_have_the_products_of_the_rounded_values(dtype: Dtype) -> None:
    """Some parts of the depth, the last with a part of a chunk; edges of rows and columns; any number of threads."""
    random, k = np.random.default_rng(0), 2144 if dtype.block == 32 else 2304
    x = random.standard_normal((29, k), np.float32)
    x[3, 70] = np.nan
    rounded_x = rounded_values(np.delete(x, 3, 0).reshape(-1)).reshape(28, k).astype(np.float64)
    for n in (1, 40, 147):
        w, acc = random_rows(dtype, n, k), random.standard_normal((29, n), np.float32)
        products = product_of_many(acc, x, dtype, w)
        chunk_products = [
            product_of_many(acc[i : i + 9], x[i : i + 9], dtype, w) for i in (0, 9, 18, 20)
        ]
        np.testing.assert_array_equal(
            products, np.concatenate([*chunk_products[:3], chunk_products[3][-2:]])
        )
        kernels.set_threads(1)
        try:
            np.testing.assert_array_equal(product_of_many(acc, x, dtype, w), products)
        finally:
            kernels.set_threads(kernels.MAX_THREADS)
        assert np.isnan(products[3]).all()
        exact = dequantize(w.view(dtype.numpy)).T.astype(np.float64)
        expected = np.delete(acc, 3, 0) + rounded_x @ exact
        assert np.abs(np.delete(products, 3, 0) - expected).max() < 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ROUNDABLE, ids=str)
def test_sums_of_many_rows_neither_overflow_nor_saturate(dtype: Dtype) -> None:
    """The largest codes with the largest integers, alike in sign."""
    k = 4096
    bits = np.full((17, k // dtype.block, dtype.block_nbytes), 0xFF, np.uint8)
    bits[3:9] = 0x80
    w = with_small_scales(dtype, bits)
    exact = dequantize(w.view(dtype.numpy)).astype(np.float64)
    x = np.concatenate([np.sign(exact[:8]), -np.sign(exact[:8])]).astype(np.float32) * 127
    y = product_of_many(np.zeros((16, 17), np.float32), x, dtype, w)
    assert (np.abs(y - x @ exact.T) < 1e-6 * (np.abs(x) @ np.abs(exact).T)).all()


@pytest.mark.parametrize("name", ["q8_0", "iq4_nl"])
def test_signed_codes_have_the_same_products_in_f32_alone_and_among_others(name: str) -> None:
    """As they are taken where there is no VNNI."""
    random, dtype, k, n = np.random.default_rng(0), DTYPES[name], 416, 13
    w, x = random_rows(dtype, n, k), random.standard_normal((8, k), np.float32)
    products, row_products = (np.zeros((8, n), np.float32) for _ in range(2))
    kernels.packed.product(products, x, dtype.number, w, False, 0)
    for i in range(8):
        kernels.packed.product(row_products[i : i + 1], x[i : i + 1], dtype.number, w, False, 0)
    np.testing.assert_array_equal(products, row_products)
    exact = x.astype(np.float64) @ dequantize(w.view(dtype.numpy)).T.astype(np.float64)
    assert np.abs(products - exact).max() < 1e-5 * np.abs(exact).max()


def test_the_least_signed_code_fits_with_the_largest_integers() -> None:
    """-128 times 127, in one sum of 16 bits."""
    w = np.zeros((1, 34), np.uint8)
    w[:, :2], w[:, 2:] = np.ones(1, np.float16).view(np.uint8), 128
    x = np.full((1, 32), -127, np.float32)
    y = product_in_integers(np.zeros((1, 1), np.float32), x, DTYPES["q8_0"], w, 1)
    assert y[0, 0] == 128 * 127 * 32


@pytest.mark.parametrize("dtype", ROUNDABLE, ids=str)
def test_integers_of_24_bits_neither_overflow_nor_lose_more_than_f32(dtype: Dtype) -> None:
    """The largest codes with the largest values, alike in sign; values of all sizes; and what is not finite."""
    k, random = 4096, np.random.default_rng(0)
    w = random_rows(dtype, 3, k)
    exact = dequantize(w.view(dtype.numpy)).astype(np.float64)
    x = np.stack(
        [np.sign(exact[0]), -np.sign(exact[0]), np.full(k, -1), random.standard_normal(k) ** 5]
    )
    x = (x * 1.7).astype(np.float32)
    y = product_in_integers(np.zeros((4, 3), np.float32), x, dtype, w, 3)
    size = np.abs(x.astype(np.float64)) @ np.abs(exact).T
    assert (np.abs(y - x.astype(np.float64) @ exact.T) < 1e-6 * size).all()
    x[1, 70] = np.inf
    y = product_in_integers(np.zeros((4, 3), np.float32), x, dtype, w, 3)
    assert np.isnan(y[1]).all() and np.isfinite(np.delete(y, 1, axis=0)).all()


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
    source, packed = tmp_path / "plain.gguf", tmp_path / "packed.gguf"
    save(source, CONFIG)
    quantize.run(QuantizeSettings(source, packed, "Q8_0"))
    return {"plain": source, "packed": packed}


def logits(model: ModelFile, chunks: tuple[int, ...]) -> np.ndarray:
    generator = Generator.from_model(model, 16, f32)
    for count in chunks[:-1]:
        generator.feed(IDS[len(generator.cached_tokens) : len(generator.cached_tokens) + count])
    return generator.feed(IDS[len(generator.cached_tokens) :]).copy()


def test_prompts_and_single_tokens_are_rounded_alike(models: dict[str, Path]) -> None:
    exact = open_model(models["packed"])
    rough = with_activations(exact, "q8")
    at_once, one_by_one = logits(rough, (8, 1, 1)), logits(rough, (1,) * len(IDS))
    size = np.abs(at_once).max()
    assert np.abs(at_once - one_by_one).max() < 1e-4 * size
    deviation = np.abs(at_once - logits(exact, (8, 1, 1))).max()
    assert 1e-4 * size < deviation < 0.05 * size


@pytest.mark.parametrize("fast", [True, False])
def test_few_rows_have_products_in_integers_and_many_where_that_is_faster(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, w = replace(CONFIG, activations="q8"), pt.weight("w", (4, 64), DTYPES["q8_0"])
    monkeypatch.setattr(
        "packtrain.models.activation_rounding.has_fast_integer_products", lambda: fast
    )
    small_batch, large_batch = (matmul_weight(config, pt.input("x", (n, 64)), w) for n in (8, 9))
    half = matmul_weight(replace(config, precision="bf16"), pt.input("x", (9, 64)), w)
    done = [
        [call.op.name for call in pt.Graph({"y": y}).calls]
        for y in (small_batch, large_batch, half)
    ]
    separate_ops = ["rounded", "matmul"]
    assert done == [["matmul_rounded"], ["matmul_rounded"] if fast else separate_ops, separate_ops]


def test_eval_takes_it_too(models: dict[str, Path], tmp_path: Path, capsys) -> None:
    (tmp_path / "t.txt").write_text("the cat the hat a bad head\n" * 40)
    said = []
    for kind in ("f32", "q8"):
        settings = EvaluateSettings((models["packed"],), tmp_path / "t.txt", activations=kind)
        assert evaluate.run(settings) == 0
        said.append(float(capsys.readouterr().out.split("perplexity ")[1].split()[0]))
    assert said[0] != said[1]
    assert said[0] == pytest.approx(said[1], rel=0.02)


def test_a_model_without_such_a_matrix_is_refused(models: dict[str, Path]) -> None:
    with pytest.raises(InputError, match=r"--activations q8: .*plain\.gguf has no matrix of q4_0"):
        opened(GenerationSettings(models["plain"], activations="q8"), lambda line: None)


def test_running_a_quantized_model_rounds_and_measuring_it_does_not(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "packtrain.workflows.generation_settings.check_precision", lambda *settings: None
    )

    def activations(model: str, **options: str) -> str:
        settings = GenerationSettings(models[model], **options)
        return opened(settings, lambda line: None).config.activations

    assert activations("packed") == "q8"
    assert activations("packed", activations="f32") == "f32"
    assert activations("packed", precision="bf16") == "f32"
    assert activations("plain") == "f32"
    assert EvaluateSettings((models["packed"],), Path("t.txt")).activations == "f32"


def test_only_long_runs_and_not_their_head_are_in_bf16() -> None:
    config, cache = replace(CONFIG, precision="bf16"), cached_transformer.CacheLayout(200)
    for time, kinds in (
        (cached_transformer.MAX_EXACT_TOKENS, {"f32"}),
        (cached_transformer.MAX_EXACT_TOKENS + 1, {"bf16"}),
    ):
        result, handles = cached_transformer.generation(
            config, transformer.weights(config), time, cache
        )
        products = [
            call.attrs["precision"]
            for call in pt.Graph({"result": result}, handles).calls
            if call.op.name == "matmul"
        ]
        assert products.pop() == "f32"
        assert len(products) >= 7 * config.block_count and set(products) == kinds


def test_guesses_are_checked_as_they_would_be_written() -> None:
    max_draft = next(f for f in fields(GenerationSettings) if f.name == "draft_max").metadata[
        "bounds"
    ][1]
    assert (
        RunSizes.of(4096, 1 + max_draft).next_size(1 + max_draft)
        <= cached_transformer.MAX_EXACT_TOKENS
    )
