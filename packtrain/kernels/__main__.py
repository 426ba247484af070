"""python -m packtrain.kernels FOLDER: compile the kernel modules named on standard input, each into its own folder."""

import sys

from packtrain.kernels.ahead import compile_into

compile_into(sys.argv[1])
