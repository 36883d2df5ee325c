"""Observation of a live run without privileges: snapshots of what any client can read."""
