"""Verbs that make, list and change packages; also `profile device` and `profile diff`, which are about devices."""
