"""Cache policies judged on a generated workload, before any of them is written for real."""
