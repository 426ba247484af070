"""Compile the kernel modules named on standard input into FOLDER: python -m packtrain.kernels FOLDER."""

import sys

from packtrain.kernels.runtime.loader import compile_into

compile_into(sys.argv[1])
