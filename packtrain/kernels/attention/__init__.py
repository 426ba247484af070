"""Attention by blocks: forward, backward and from a KV cache; rotary positions."""
