"""Modules that every service process shares: its place in the run, its memory, its sign of life."""
