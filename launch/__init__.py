"""The command line, and the supervisor of a run's processes."""
