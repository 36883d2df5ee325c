"""The coordinator: schedules requests and steps, and samples tokens."""
