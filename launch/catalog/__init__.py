"""What the models of the catalog would do on a device: estimates by the planner, their order, and the first offer."""
