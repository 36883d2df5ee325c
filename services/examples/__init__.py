"""Example workers, as a start for experiments."""
