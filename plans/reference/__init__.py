"""The reference engine: numpy, slow, simple enough to be checked by reading; every other engine is compared with it."""
