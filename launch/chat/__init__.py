"""A chat in the terminal: the loop, its input and its options."""
