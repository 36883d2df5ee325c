"""Benchmarks of this machine: what a device profile is measured with, and the measurements earlier starts have left."""
