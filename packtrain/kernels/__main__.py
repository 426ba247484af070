"""python -m packtrain.kernels FOLDER NAME…: compile these kernel modules into that cache folder."""

import sys

from packtrain.kernels.runtime import compile_into

compile_into(sys.argv[1], sys.argv[2:])
