"""Decode and prefill workers: who computes the steps."""
