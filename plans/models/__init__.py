"""Model descriptions as data: the class `ModelSpec`, and a file for each family that reads its configurations."""
