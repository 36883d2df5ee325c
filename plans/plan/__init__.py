"""The plan document, and the memory of a run that follows from it."""
