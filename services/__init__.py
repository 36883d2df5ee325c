"""The services: one process each, and what they share."""
