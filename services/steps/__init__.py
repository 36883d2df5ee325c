"""Steps as the processes that compute them see them: the backend interface, shares of work and counters."""
