"""Verbs that plan, simulate, measure and test."""
