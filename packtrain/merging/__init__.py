"""Adapters merged into packed matrices with data at hand, so that what was learnt outlives the rounding.

grid: codes and steps of packed rows. feedback: one matrix rounded with error feedback. streams: what each matrix reads,
with the adapter and as merged. calibrated: block by block through a model. room: what all that takes.
"""
