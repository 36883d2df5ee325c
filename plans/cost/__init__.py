"""The cost model: time, misses and reads that a plan expects."""
