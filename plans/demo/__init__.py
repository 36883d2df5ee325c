"""The demo model's package, which the first command runs, and the text that it learned."""
