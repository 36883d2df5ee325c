"""Prompts on a neural processor: see README.md."""
