"""python -m packtrain.kernels FOLDER NAME…: compile these kernel modules, each into its own folder below FOLDER."""

import sys

from packtrain.kernels.runtime import compile_into

compile_into(sys.argv[1], sys.argv[2:])
