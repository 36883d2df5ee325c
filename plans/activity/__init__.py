"""Activity profiles: how often the tokens of a text access each neuron, recorded from a run, for the planner."""
