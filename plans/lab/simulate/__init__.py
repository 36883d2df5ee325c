"""Simulation of decode and prefill on described devices, and a comparison of cache policies."""
