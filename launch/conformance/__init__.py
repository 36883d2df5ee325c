"""What every implementation of a role must bear, and the suite that tries it."""
