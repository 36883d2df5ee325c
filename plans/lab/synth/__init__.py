"""Synthetic models with real shapes and published activation statistics, for measurements and tests."""
