"""Serving over HTTP: restarts of runs, and several packages."""
