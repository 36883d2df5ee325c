"""The connection to a run's coordinator, and the fair queue in front of it."""
