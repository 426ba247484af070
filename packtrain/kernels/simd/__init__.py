"""Vectors in registers: the words in which kernels are written."""
