"""Described devices: files of published and assumed values, and their form for the planner."""
