"""Shapes of models that have no package: sizes, and the manifest that a package would have."""
