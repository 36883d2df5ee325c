"""Shapes of models without a package: their sizes, and the manifest that a package would have."""
