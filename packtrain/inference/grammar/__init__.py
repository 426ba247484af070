"""Grammars: GBNF and JSON schemas decide which tokens can come next. llguidance (extra `grammar`) computes the masks.

This package knows tokenizers, but no models."""

from packtrain.inference.grammar.grammar import Grammar
