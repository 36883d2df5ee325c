"""Activity profiles: which neurons a text wants, recorded from a run, and what a planner wants to know of that."""
