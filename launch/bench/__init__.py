"""Measuring a run through the protocol that every client speaks."""
