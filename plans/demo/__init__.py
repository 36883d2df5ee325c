"""The demo model's package, which the first command runs, and its training text."""
