"""The packages that are served, and the runs that serve them."""
