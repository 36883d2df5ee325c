"""Serving over HTTP: runs that are started again, and several packages."""
