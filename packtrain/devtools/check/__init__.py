"""Checks of every op: its value on each backend, and its gradients, against the specification, finite differences in
float64, and PyTorch where it is installed. A check yields a CheckResult; nothing raises for a large error."""
