"""The kernels as they are compiled for a lesser CPU: all checks of products pass there, too."""

import os
import subprocess
import sys

import pytest

PRODUCTS = (
    "matmul",
    "matmul_back",
    "out_prod",
    "matmul_id",
    "linear_cross_entropy",
    "conv_2d",
    "attention",
)


@pytest.mark.parametrize("cpu", ["avx2"])
def test_products_on_a_lesser_cpu(cpu):
    environment = os.environ | {"PACKTRAIN_CPU": cpu}
    run = [sys.executable, "-c", "from packtrain.kernels import gemm; print(gemm.AVX512)"]
    found = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert found.stdout == "False\n", found.stderr
    check = [sys.executable, "-m", "packtrain", "check", *PRODUCTS]
    done = subprocess.run(check, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
