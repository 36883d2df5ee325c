"""What options mean when they are not typed: defaults from the user's file."""
