"""The cost model: the times, misses and reads that are expected of a plan."""
