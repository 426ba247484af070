"""The kernels as they are compiled for a lesser CPU: all checks of products pass there, too."""

import os
import subprocess
import sys

import pytest

from packtrain.kernels import panels

PRODUCTS = (
    "matmul",
    "matmul_back",
    "out_prod",
    "matmul_id",
    "matmul_rounded",
    "linear_cross_entropy",
    "conv_2d",
    "attention",
)


FLAGS = "from packtrain.kernels import panels; print(panels.AVX512, panels.HALF, panels.AMX)"


def run_python(cpu, *command, **variables):
    """The output of Python, with kernels for this CPU."""
    environment = os.environ | {"PACKTRAIN_CPU": cpu} | variables
    argv = [sys.executable, *command]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_products_on_a_lesser_cpu():
    assert run_python("avx2", "-c", FLAGS) == "False False False\n"
    run_python("avx2", "-m", "packtrain", "check", *PRODUCTS)


@pytest.mark.skipif(not panels.AMX, reason="this CPU has no AMX")
def test_bf16_without_amx():
    assert run_python("avx512", "-c", FLAGS) == "True True False\n"
    run_python("avx512", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_half.py")


@pytest.mark.skipif(not panels.AMX, reason="this CPU has no AMX")
def test_tiles_that_linux_refuses_are_not_used(tmp_path):
    """In a cache of its own: to the children that compile, Linux does not refuse them."""
    refused = "from packtrain.kernels.runtime import environment; environment.ARCH_PRCTL = -1; "
    env_variables = {"XDG_CACHE_HOME": str(tmp_path)}
    assert run_python("", "-c", refused + FLAGS, **env_variables) == "True True False\n"
