"""Verbs that start, use and manage runs."""
