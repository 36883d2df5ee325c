"""Plans: who computes what where, what is resident, how flash is read, what to expect."""
