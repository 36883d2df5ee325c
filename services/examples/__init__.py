"""Workers to learn from, and to start an experiment with."""
