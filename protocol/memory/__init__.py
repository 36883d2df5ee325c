"""Shared memory: layouts of segments, their mappings, residency entries and spans."""
