"""Verbs about the command itself."""
