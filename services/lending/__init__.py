"""Memory that texts do not need yet, lent to slots: what the coordinator and the cache decide, without sockets."""
