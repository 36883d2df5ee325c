"""What a decode or prefill step is to the processes that compute it: the backend interface, shares and counters."""
