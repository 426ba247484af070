"""Measurements for `packtrain bench`: rates of the machine, ops of a step beside their floors, products and whole steps
beside PyTorch. Peers run in processes of their own and take turns; figures are medians."""
