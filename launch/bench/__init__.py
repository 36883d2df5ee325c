"""Benchmarks of a package: tests on a live run, measured through the protocol that every client uses."""
