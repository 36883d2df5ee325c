"""Live runs in a terminal: where snapshots come from, and how they look."""
