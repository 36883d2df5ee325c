"""Traces of a run: spans from the processes' rings, drawn as a picture or written as trace events."""
