"""The cache manager: which clusters are resident."""
