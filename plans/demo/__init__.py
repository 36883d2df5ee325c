"""The package of the demo model, and its training text."""
