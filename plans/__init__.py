"""Offline work: packages and conversion, profiles, the planner and the reference engine."""
