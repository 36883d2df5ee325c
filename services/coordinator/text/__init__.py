"""Tokenizer, grammars and constrained answers."""
