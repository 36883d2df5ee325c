"""The scheduler and its parts, without sockets and without a clock."""
