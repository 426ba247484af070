"""Measurements for `packtrain bench`: rates of the machine, ops of a step beside their floors, products, whole steps.
Figures are medians; benchmarks/ compares them with other programs."""
