"""The cost model: the time, the misses and the reads that a plan expects."""
