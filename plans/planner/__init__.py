"""The planner: from a package, a device and a limit to a plan."""
