"""One file per verb: its arguments, what it does, how it prints."""
