"""Quantize and dequantize rows, with the functions of dtypes/."""
