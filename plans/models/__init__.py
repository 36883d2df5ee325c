"""Model descriptions as data: one `ModelSpec` for every architecture, and one file for each family."""
