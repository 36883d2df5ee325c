"""What answers must follow: see README.md."""
