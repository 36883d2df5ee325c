"""The loader service."""
