"""Element-wise functions, sums, norms, gathered rows and optimizer steps."""
