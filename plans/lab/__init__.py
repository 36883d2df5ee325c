"""Simulation, synthetic models and the demo model's training. Commands use it, runs do not."""
