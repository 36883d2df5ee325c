"""The demo model: how it was trained, and the package that the first command runs."""
