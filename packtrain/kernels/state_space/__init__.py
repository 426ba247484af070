"""Layers that carry a state along time: Mamba-2's scan, the delta rule, short convolutions."""
