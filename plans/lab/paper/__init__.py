"""Simulation of the figures of PowerInfer-2's paper."""
