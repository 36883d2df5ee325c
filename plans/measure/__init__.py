"""Benchmarks of this machine: measurement of a device profile, and the cache of earlier measurements."""
