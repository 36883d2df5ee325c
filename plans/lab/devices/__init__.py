"""Devices described by files of published and assumed values, for the simulator and the planner."""
