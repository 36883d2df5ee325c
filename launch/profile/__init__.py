"""Profiles: of a device as people see them (page.py in words and tables, picture.py as curves); of a package, recorded
by a run (activity.py)."""
