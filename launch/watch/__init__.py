"""Live runs in a terminal: the sources of snapshots, and their display."""
