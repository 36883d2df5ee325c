"""The reference engine, with which all others are compared: in numpy, simple enough to check by reading, but slow."""
