"""Watching a live run without privilege: what it tells everybody, made into snapshots."""
