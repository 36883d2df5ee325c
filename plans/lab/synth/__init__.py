"""Models made here instead of downloaded: real shapes, published activation statistics; for measurements and tests."""
