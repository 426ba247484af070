"""Merges LoRA adapters into quantized matrices with calibration data, which keeps learned outputs despite rounding.

block_streams: the inputs of each matrix, unmerged and merged. error_feedback: rounds one matrix (GPTQ).
rounding_grid, grid_points: codes and steps of quantized rows. calibrated_rounding: block by block through a model.
calibration_inputs: how much data memory allows."""
