"""Calibrated merging of LoRA adapters into quantized matrices: uses data to keep what was learned despite rounding.

grid: codes and steps of quantized rows. feedback: rounds one matrix with error feedback (GPTQ). streams: the inputs of
each matrix, with the adapter and as merged. calibrated: block by block through a model. reading: how much data memory
allows.
"""
