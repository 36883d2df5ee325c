"""Checks of this machine for `doctor`."""
