"""Grammars: GBNF and JSON schemas decide which tokens can come next. llguidance (extra `grammar`) computes the masks.

It knows tokenizers, and no models.
"""

from packtrain.inference.grammar.grammar import Grammar

__all__ = ["Grammar"]
