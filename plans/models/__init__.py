"""What models are, as data: one description for every architecture, and a file for each family that has it."""
