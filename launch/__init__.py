"""What a person types: the command line, the supervisor and the client that every verb uses."""
