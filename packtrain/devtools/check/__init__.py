"""Checks of every op: its value on each backend, and its gradients, against the specification, finite differences in
float64, and PyTorch where that is installed. A check gives figures (Found); nothing here raises for a wrong one.
"""
