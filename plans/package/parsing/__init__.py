"""Strict parsing of manifest.json and its sections."""
