"""Device profiles as people see them: page.py in words and tables, picture.py as curves."""
