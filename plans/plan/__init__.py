"""The plan: its document, and the memory that follows from it."""
