"""Work whose cost a stranger chooses, in a process that can be killed."""
