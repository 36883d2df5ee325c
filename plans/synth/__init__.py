"""Models made here instead of downloaded: the shapes of real ones, for measurements and tests."""
