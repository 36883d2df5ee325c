"""The planner: it searches for the plan with the best expected speed within a memory limit."""
