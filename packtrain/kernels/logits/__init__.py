"""Rows of logits: cross-entropy, the fused head, and the choice of tokens."""
