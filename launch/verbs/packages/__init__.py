"""Verbs that make, list and change packages, and `profile device`."""
