"""Simulation, synthetic models and the demo model's training: used by verbs, never by a run."""
