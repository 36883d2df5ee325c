"""Tests of implementations of a role: the suite of `conformance`, and the trial run of `swap`."""
