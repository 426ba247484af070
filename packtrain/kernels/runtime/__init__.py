"""Compile, cache and load kernels, and run their tasks on threads."""
