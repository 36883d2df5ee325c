"""The reference engine: numpy, slow and obviously right; what every other engine is compared with."""
