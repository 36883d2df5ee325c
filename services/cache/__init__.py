"""The cache manager, which decides which clusters are resident."""
